"""Says where a resumed run quantizes otherwise than the run that wrote its checkpoint."""

from argparse import Namespace

from megatron.quant import QuantConfig

# An attribute of upstream's arguments, which its checkpoints hold: {site: types, by step}.
TYPES = "mqo_types"

_of_checkpoint: dict[str, str] = {}


def note_checkpoint(checkpoint_args: Namespace) -> None:
    """Take note of the types of a checkpoint that is being loaded; the patched trainer calls it."""
    global _of_checkpoint
    _of_checkpoint = dict(getattr(checkpoint_args, TYPES, {}))


def keep_types(args: Namespace, options: QuantConfig) -> list[str]:
    """Put the run's types where its checkpoints take them from; say what is not the checkpoint's.

    Shares of the training become steps: a run that is resumed for longer ends its phases elsewhere,
    and that is said, too.
    """
    total = getattr(args, "train_iters", None)
    types = {site: _by_step(options, site, total) for site in options.asked}
    setattr(args, TYPES, types)
    return [
        f"{site} was {was} in the run that wrote the checkpoint, and is {types.get(site, 'none')}"
        for site, was in _of_checkpoint.items()
        if was != types.get(site, "none")
    ]


def _by_step(options: QuantConfig, site: str, total: int | None) -> str:
    """A site's types in the form of a schedule, with steps."""
    *first, last = options.phases(site)
    parts = [f"{phase.quant_type} until {phase.ends(total)}" for phase in first]
    return ", then ".join([", ".join(parts), last.quant_type] if parts else [last.quant_type])
