"""Check the arguments in a checkpoint: which are used, their kinds and their ranges.

A checkpoint contains the argparse namespace of the program that wrote it. Kinds and choices come
from upstream's parser, groups and ranges from checkpoint_args.toml (`args_table`).
"""

import functools
import reprlib
import stat
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.megatron.run.args_table import IGNORE_FLAG, is_empty, read_table, unknown_arguments
from mqo.megatron.run.gpt_blocks import PATTERN, VALID, given_pattern, has_sizes
from mqo.megatron.run.unpickle import CheckpointError

LAYERS = "megatron.core."
STATES = "mqo_states"  # {the state of a custom quantizer: its value in JSON}
_LONGEST_TEXT, _LONGEST_LIST = 1 << 20, 1 << 16
_LARGEST_INT, _LARGEST_FLOAT = (1 << 31) - 1, 1e12
_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
_HELP = "Give another checkpoint"
# {name in older releases: name of the same value in this one}
_RENAMED = {"norm_epsilon": "layernorm_epsilon"}


@dataclass(frozen=True)
class Kind:
    """The values that an argument may have: a text, and a test."""

    words: str
    fits: Callable[[Any], bool]

    def or_none(self) -> "Kind":
        """Return the kind that also allows None."""
        return Kind(f"{self.words}, or None", lambda value: value is None or self.fits(value))


def check_kinds(saved: Mapping[str, Any], where: object) -> None:
    """Check the kind and the range of every argument that a program reads from a checkpoint.

    `where` names the checkpoint. Names that neither the parser nor the table has are skipped.

    Raises:
        CheckpointError: an argument has another kind, or is out of range.
    """
    table, kinds = read_table(), all_kinds()
    for name in sorted(saved.keys() & kinds.keys()):
        value = saved[name]
        if not kinds[name].fits(value):
            raise _refused(where, name, value, kinds[name].words)
        if name in table.files and isinstance(value, str) and not _is_readable(value):
            raise _refused(where, name, value, "a file or a folder")


def with_names_of_this_release(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's arguments with older names replaced by this release's names.

    If the checkpoint has both, the older name stays, and is refused as unknown.
    """
    known, renamed = upstream_parser().keys(), dict(saved)
    for older, name in _RENAMED.items():
        if older in renamed and older not in known and name in known and name not in renamed:
            renamed[name] = renamed.pop(older)
    return renamed


def checked_arguments(saved: Namespace) -> Namespace:
    """Check the kinds of the arguments of the checkpoint that a training loads; return them.

    The patched trainer calls this before it reads them. Raises the errors of `check_kinds`.
    """
    check_kinds(vars(saved), "The loaded checkpoint")
    return saved


def model_arguments(
    saved: Mapping[str, Any], where: object, ignored: Collection[str] = (), help: str = ""
) -> dict[str, Any]:
    """Return the arguments of a checkpoint that define its model.

    Other arguments are left out, so that the parser's defaults apply. `ignored` are unknown names
    that the user accepts. `help` tells what to do about others in a program without a flag for it.

    Raises:
        CheckpointError: an argument is unknown, missing, of a wrong kind or out of range, or no
            program here can build the model from a checkpoint.
    """
    refuse_unknown(saved, where, ignored, help)
    check_kinds(saved, where)
    table, known = read_table(), upstream_parser().keys()
    for name in sorted(table.needed):
        if saved.get(name) is None:
            raise _refused(where, name, None, all_kinds()[name].words)
    for name in sorted(table.unsupported | (table.model - known)):
        allowed = list(table.values["all"].get(name, ()))
        if not is_empty(saved.get(name)) and not _is_one_of(allowed, saved[name]):
            raise _refused(
                where, name, saved[name], "no value, because no program here builds such a model"
            )
    pattern = given_pattern(saved)
    if pattern is not None and not has_sizes(pattern, saved):
        layers = "layers whose sizes the other arguments have: + for MLA, E for experts"
        raise _refused(where, PATTERN, pattern, layers)
    path, content = _HETEROGENEOUS
    if saved.get(path) and not saved.get(content):
        raise _refused(where, content, None, f"the content of {path}")
    names = sorted(table.taken & all_kinds().keys() & saved.keys())
    # Programs that build a model from a checkpoint have one pipeline stage.
    stages = {PATTERN: pattern} if PATTERN in names else {}
    return {name: saved[name] for name in names} | stages


def refuse_unknown(
    saved: Mapping[str, Any], where: object, ignored: Collection[str] = (), help: str = ""
) -> None:
    """Raise CheckpointError for an argument with a value that this release does not know."""
    try:
        unknown = unknown_arguments(saved, ignored)
    except ValueError as error:
        raise CheckpointError(f"{error}. Expected: the name of an unknown argument") from error
    if unknown:
        name = unknown[0]
        help = help or f"If the model does not depend on it, pass {IGNORE_FLAG} {name}"
        raise CheckpointError(
            f"{where} has {name} = {_shown(saved[name])}, and this release of Megatron has no such "
            f"argument. Expected: known arguments, because an unknown one may change the model. "
            f"{help}"
        )


def _refused(where: object, name: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"{where} has {name} = {_shown(value)}. Expected: {expected}. {_HELP}")


def _shown(value: Any) -> str:
    """Return the start of a value's text."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        return f"a value of the type {type(value).__name__}"


def _is_readable(path: str) -> bool:
    """Return whether a path names a file or a folder, or does not exist."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return True
    except OSError:  # a name that is too long, or a loop of links
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


# -- kinds -----------------------------------------------------------------------------------------


@functools.cache
def upstream_parser() -> Mapping[str, Action]:
    """Return {name: action} of upstream's parser."""
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    # The first of several actions has the default.
    return {action.dest: action for action in reversed(parser._actions) if action.dest != "help"}


@functools.cache
def all_kinds() -> Mapping[str, Kind]:
    """Return {argument: kind} for the arguments that programs read from a checkpoint."""
    table, parser = read_table(), upstream_parser()
    names = (table.taken | table.read | table.unsupported) & parser.keys()
    kinds = {name: _kind(name, parser[name]) for name in names}
    layers = "the layers * + - E and M, and | between pipeline stages"
    kinds[PATTERN] = Kind(f"a pattern of {layers}", _is_pattern).or_none()
    kinds["spec"] = Kind(f"two texts, a module {LAYERS}* and a name in it", _is_spec).or_none()
    counts = (
        *("world_size", "data_parallel_size", "consumed_train_samples"),
        *("consumed_valid_samples", "skipped_train_samples"),
    )
    kinds |= {name: _number(name, int, 0) for name in counts}
    texts = Kind("a table of texts", _is_table_of_texts)
    return kinds | {
        "mqo_types": texts,
        "mqo_operands": texts,
        "mqo_formats": texts,
        "mqo_plugins": texts,
        STATES: texts,
        "mqo_modelopt_format": _TEXT.or_none(),
    }


def _kind(name: str, action: Action) -> Kind:
    """Return the kind of the values that `action`, or upstream afterwards, stores."""
    kind = _item(name, action)
    if action.nargs in ("*", "+") or (isinstance(action.nargs, int) and action.nargs > 1):
        kind = _list(kind, single=not isinstance(action.default, list | tuple | None))
    optional = action.default is None and name not in read_table().needed
    return kind.or_none() if optional else kind


def _item(name: str, action: Action) -> Kind:
    if action.nargs == 0:
        return Kind("True or False", lambda value: isinstance(value, bool))
    if action.choices is not None:
        choices = list(action.choices)
        return Kind(" or ".join(map(repr, choices)), functools.partial(_is_one_of, choices))
    if action.type in (int, float):
        return _number(name, action.type, action.default)
    if action.type in (str, None):
        return _TEXT
    # Upstream's functions parse a choice of layers: every n-th, or a list.
    return _list(_number(name, int, -1), single=True)


def _number(name: str, kind: type, default: Any) -> Kind:
    least = default if isinstance(default, int | float) and default < 0 else 0
    most = _LARGEST_INT if kind is int else _LARGEST_FLOAT
    least, most = read_table().ranges.get(name, (least, most))
    kinds = (int,) if kind is int else (int, float)
    words = f"a{' whole' * (kind is int)} number from {least} to {most}"
    return Kind(words, lambda value: type(value) in kinds and least <= value <= most)


def _list(item: Kind, *, single: bool) -> Kind:
    """Return the kind of a list of items; with `single` also of one item."""

    def fits(value: Any) -> bool:
        if not isinstance(value, list | tuple):
            return single and item.fits(value)
        return 0 < len(value) <= _LONGEST_LIST and all(map(item.fits, value))

    return Kind(f"{item.words}{', or' if single else ': at least one, in'} a list of them", fits)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT and "\0" not in value


_TEXT = Kind("a text", _is_text)


def _is_one_of(choices: list[Any], value: Any) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _is_spec(value: Any) -> bool:
    two = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_text, value))
    return two and value[0].startswith(LAYERS)


def _is_pattern(value: Any) -> bool:
    return _is_text(value) and VALID.fullmatch(value) is not None


def _is_table_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, [*value, *value.values()]))
