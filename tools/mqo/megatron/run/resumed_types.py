"""Report where a resumed run quantizes differently from the run that wrote its checkpoint."""

from argparse import Namespace
from copy import copy

from mqo.megatron.run.plugin_states import load_states
from mqo.megatron.run.saved_args import checked_arguments
from mqo.megatron.run.unpickle import CheckpointError
from mqo.quant.operand_table import OperandRow
from mqo.quant.quant_config import QuantConfig

# An attribute of upstream's arguments, which checkpoints contain: {site: types by step}.
TYPES = "mqo_types"
# Another one: {operand, or "rules": its options}.
ROWS = "mqo_operands"

# A third one: {custom quantizer: its version and its options}; only of runs with one.
PLUGINS = "mqo_plugins"
# A fourth one: {the user's format: its digest}; only of runs with one.
FORMATS = "mqo_formats"

_PLAIN = "the type of its site"
_PATTERNS = ("exclude", "include")


# The arguments of the loaded checkpoint.
_loaded = Namespace()


def note_checkpoint(checkpoint_args: Namespace) -> None:
    """Record the types of a checkpoint that is being loaded, and take the states of quantizers.

    The patched trainer calls this.

    Raises:
        CheckpointError: an argument of the checkpoint has a wrong type, or is out of range.
    """
    global _loaded
    _loaded = copy(checked_arguments(checkpoint_args))
    load_states(checkpoint_args)


def keep_types(args: Namespace, options: QuantConfig) -> list[str]:
    """Store the run's types for its checkpoints; return the differences from the loaded one.

    Shares of the training become steps, so a run that is resumed for longer also reports phases
    that end at another step.

    Raises:
        CheckpointError: a format of the user has other numbers than in the training to continue.
    """
    _check_formats(args, options)
    total = getattr(args, "train_iters", None)
    types = {site: _by_step(options, site, total) for site in options.asked}
    setattr(args, TYPES, types)
    rows = _rows(options)
    setattr(args, ROWS, rows)
    if versions := _versions(options):
        setattr(args, PLUGINS, versions)
    if options.formats:
        setattr(args, FORMATS, {name: row.digest for name, row in options.formats.items()})
    before = getattr(_loaded, TYPES, {})
    texts = [(site, was, types.get(site, "none")) for site, was in before.items()]
    # A checkpoint with neither is not of mqo.
    before = getattr(_loaded, ROWS, {} if before else rows)
    for name in sorted(before.keys() | rows.keys()):
        texts.append((name, *(table.get(name, _absent(name)) for table in (before, rows))))
    before = getattr(_loaded, PLUGINS, {})
    texts += [(name, was, versions.get(name, was)) for name, was in before.items()]
    # A tokenizer that is trained on a text changes with the text.
    was, now = (getattr(here, "tokenizer_model", None) for here in (_loaded, args))
    texts += [("the tokenizer", was, now)] if was and now else []
    return [
        f"{name} was {was} in the run that wrote the checkpoint, and is {now}"
        for name, was, now in texts
        if was != now
    ]


def _check_formats(args: Namespace, options: QuantConfig) -> None:
    """Raise CheckpointError for a format with other numbers than in the training to continue.

    Finetuning starts a new training.
    """
    for name, row in options.formats.items():
        was = getattr(_loaded, FORMATS, {}).get(name, row.digest)
        if was != row.digest and not getattr(args, "finetune", False):
            raise CheckpointError(
                f"{name} was {was[: len(row.version)]} in the run that wrote the checkpoint, and "
                f"is {row.version}. Expected: the row of the checkpoint, as in the run's "
                "cell.json. Give the other row another name, or give another CHECKPOINT"
            )


def _rows(options: QuantConfig) -> dict[str, str]:
    """Return the options of operands, the rules and patterns of layers and recipes, as text."""
    rows = {name: _row_text(row) for name, row in options.operands.items()}
    for name, recipe in options.recipes.items():
        types = [f"{site} {kind}" for site, kind in recipe.types.items()]
        operands = [f"{operand} ({_row_text(row)})" for operand, row in recipe.operands.items()]
        rows[f"recipe {name}"] = ", ".join([*types, *operands])
    patterns = {name: ", ".join(getattr(options, name)) for name in _PATTERNS}
    rows |= {name: text for name, text in patterns.items() if text}
    rules = [rule.text for rule in options.rules]
    return rows | ({"rules": "; ".join(rules)} if rules else {})


def _absent(name: str) -> str:
    """Return the text of a row that is not there."""
    return _PLAIN if "." in name else "none"


def _row_text(row: OperandRow) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.chosen.items())


def _versions(options: QuantConfig) -> dict[str, str]:
    """Return the version and the options of each custom quantizer, as text."""
    own = options.own_types()
    return {name: row.text for name, row in options.plugins.items() if name in own}


def _by_step(options: QuantConfig, site: str, total: int | None) -> str:
    """Return a site's types as text, with the steps of its schedule."""
    *first, last = options.phases(site)
    parts = [f"{phase.quant_type} until {phase.ends(total)}" for phase in first]
    return ", then ".join([", ".join(parts), last.quant_type] if parts else [last.quant_type])
