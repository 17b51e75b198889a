"""What a run may choose beyond its types: the one definition of each option.

quant.toml, the flags of train_config.py and the table in docs/formats.md follow from the fields of
`Options`. What this module imports needs the standard library alone: `mqo`, which does not import
torch, loads it without the package that it lies in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from . import excludes
from .formats import (
    BLOCK_SIZES,
    OVERFLOWS,
    ROUNDINGS,
    SAVED_FORMS,
    SCALE_RULES,
    check_choice,
    check_seed,
)

ENVIRONMENT_VARIABLE = "MQO_QUANT_CONFIG"  # names the file


@dataclass(frozen=True)
class Option:
    """An option: the key `name` in `[table]` of quant.toml, and `flag` of train_config.py.

    `check` raises ValueError for a value that is none; `valid` are the values where they can be
    listed. `kind` is the type of a value, or of its items where the option is a list, `many`.
    `shown` says in words what the default is. `metavar` stands for the value in the help.
    """

    table: str
    flag: str
    default: Any
    help: str
    check: Callable[[object], None] | None = None
    valid: tuple[Any, ...] = ()
    kind: type = str
    metavar: str | None = None
    shown: str = ""
    name: str = ""

    @property
    def many(self) -> bool:
        """Whether it is a list, whose flag is repeatable."""
        return isinstance(self.default, tuple)


# bool is an int in Python, and `true` is no number.
def _check_count(value: object) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number; valid: 0, 1, 2, ...")


def _check_dump(value: object) -> None:
    if not isinstance(value, list) or not all(type(i) is int and i > 0 for i in value):
        raise ValueError(f"{value!r} is no list of iterations, such as [1, 100]")


def _option(table: str, flag: str, default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(table, flag, default, help, **more)})


_quantiser, _record, _run = (partial(_option, name) for name in ("quantiser", "record", "run"))
_SWITCH = {"valid": (False, True), "kind": bool}


@dataclass(frozen=True)
class Options:
    """The options of a run, with the value of each where nothing was chosen."""

    block: int = _quantiser(
        "--block", 32, "elements that share an mx scale", valid=BLOCK_SIZES, kind=int
    )
    scale_rule: str = _quantiser(
        "--scale-rule", "floor", "how an mx scale follows from its block", valid=SCALE_RULES
    )
    # None is each format's own.
    rounding: str | None = _quantiser(
        "--rounding",
        None,
        "how elements are rounded",
        valid=ROUNDINGS,
        shown="nearest-even for mx, nearest-away for hifp8",
    )
    overflow: str = _quantiser(
        "--overflow", "saturate", "what hifp8 makes of what is too large", valid=OVERFLOWS
    )
    save_activations: str = _quantiser(
        "--save-activations",
        "full",
        "what linear layers keep of inputs; packed: codes",
        valid=SAVED_FORMS,
    )
    tensor_scale: bool = _quantiser(
        "--tensor-scale", False, "give hifp8 a power of two as a scale for each tensor", **_SWITCH
    )
    seed: int = _quantiser(
        "--quant-seed",
        0,
        "the base of all seeds of stochastic rounding",
        check=check_seed,
        kind=int,
        metavar="N",
    )
    cache_weights: bool = _quantiser(
        "--cache-weights", False, "quantise a weight once an optimizer step", **_SWITCH
    )
    exclude: tuple[str, ...] = _option(
        "layers",
        "--exclude",
        (),
        "layers to leave unquantised: output_layer, 'decoder.layers.0.*', 'qk:*.1.*'",
        check=excludes.check,
        metavar="[SITE:]GLOB",
    )
    every: int = _record(
        "--record-every",
        50,
        "measure the quantisers in the first and each Nth iteration; 0: never",
        check=_check_count,
        kind=int,
        metavar="N",
    )
    dump: tuple[int, ...] = _record(
        "--dump",
        (),
        "an iteration whose operands are saved, for `mqo stats`",
        check=_check_dump,
        kind=int,
        metavar="ITERATION",
    )
    keep_checkpoints: int = _run(
        "--keep-last",
        0,
        "checkpoints to keep of those that the run saves; 0: all",
        check=_check_count,
        kind=int,
        metavar="N",
        shown="standard keeps 3, the others all",
    )
    check_nan: bool = _run(
        "--check-nan", False, "find the layer of the first NaN or Inf; slow", **_SWITCH
    )


def _named(name: str, option: Option) -> Option:
    choice = partial(check_choice, name.replace("_", " "), valid=option.valid)
    return replace(option, name=name, check=option.check or choice)


OPTIONS = {f.name: _named(f.name, f.metadata["option"]) for f in fields(Options)}
TABLES = tuple(dict.fromkeys(option.table for option in OPTIONS.values()))


def check(options: dict[str, Any]) -> None:
    """Raise ValueError, naming the option and what is valid, for an unknown name or value."""
    for name, value in options.items():
        check_choice("option", name, tuple(OPTIONS))
        check_value(OPTIONS[name].table, name, OPTIONS[name].check, value)


def check_value(table: str, name: str, checked: Callable[[object], None], value: object) -> None:
    """Raise the ValueError of a check, with the place in quant.toml."""
    try:
        checked(value)
    except ValueError as error:
        raise ValueError(f"[{table}] {name}: {error}") from error
