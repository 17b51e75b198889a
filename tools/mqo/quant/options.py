"""The options of a run other than its quant types, each defined once.

The fields of `Options` define quant.toml and the flags of train_config.py. This module imports only
the standard library, because commands do not load torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from mqo.quant import excludes
from mqo.quant.formats import (
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

    `checked_by` raises ValueError for an invalid value; `valid` lists the valid ones if possible.
    `kind` is the type of a value, or of an item if the option is a list (`many`). `shown` describes
    the default in the help, and `metavar` names the value there.
    """

    table: str
    flag: str
    default: Any
    help: str
    checked_by: Callable[[object], object] | None = None
    valid: tuple[Any, ...] = ()
    kind: type = str
    metavar: str | None = None
    shown: str = ""
    name: str = ""

    def check(self, value: object) -> None:
        """Raise ValueError, naming the valid values, if `value` is not valid."""
        if self.checked_by is not None:
            self.checked_by(value)
        else:
            check_choice(self.name.replace("_", " "), value, self.valid)

    @property
    def many(self) -> bool:
        """Whether it is a list, whose flag is repeatable."""
        return isinstance(self.default, tuple)


# bool is a subclass of int, but `true` is not a number.
def _check_count(value: object) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"invalid number {value!r}; valid: 0, 1, 2, ...")


def _check_dump(value: object) -> None:
    if not isinstance(value, list) or not all(type(i) is int and i > 0 for i in value):
        raise ValueError(f"invalid iterations {value!r}; valid: a list such as [1, 100]")


def _option(table: str, flag: str, default: Any, valid: Any, help: str, **more: Any) -> Any:
    """Return a field; `valid` are its valid values, or a function that checks a value."""
    more |= {"checked_by": valid} if callable(valid) else {"valid": valid, "kind": type(valid[0])}
    option = Option(table, flag, default, help, **more)
    return field(default=default, metadata={"option": option})


_quantizer, _record, _run = (partial(_option, name) for name in ("quantizer", "record", "run"))
_SWITCH = (False, True)
_N: dict[str, Any] = {"kind": int, "metavar": "N"}


@dataclass(frozen=True)
class Options:
    """The options of a run, with their defaults.

    For `block` and `rounding`, None means the format's own value.
    """

    block: int | None = _quantizer(
        *("--block", None, BLOCK_SIZES, "number of elements that share an mx scale"),
        shown="the format's own",
    )
    scale_rule: str = _quantizer(
        *("--scale-rule", SCALE_RULES[0], SCALE_RULES),
        "how the scale of a block follows from it, in formats that have the rule",
        shown="floor for mx formats, amax for two levels",
    )
    rounding: str | None = _quantizer(
        *("--rounding", None, ROUNDINGS, "how to round elements"),
        shown="nearest-away for hifp8 and hif4, else nearest-even",
    )
    overflow: str = _quantizer(
        "--overflow", "saturate", OVERFLOWS, "how hifp8 handles overflow: saturate, or Inf"
    )
    save_activations: str = _quantizer(
        *("--save-activations", "full", SAVED_FORMS),
        "form in which linear layers save inputs for backward; packed: as codes",
    )
    tensor_scale: bool = _quantizer(
        "--tensor-scale", False, _SWITCH, "use a power-of-two scale per tensor with hifp8"
    )
    smooth_key: bool = _quantizer(
        *("--smooth-key", False, _SWITCH),
        "subtract the mean key over tokens before quantizing QK",
    )
    unnormalized_probs: bool = _quantizer(
        *("--unnormalized-probs", False, _SWITCH),
        "quantize exp(score - row maximum) in pv, and divide by its sum after the product",
    )
    seed: int = _quantizer("--quant-seed", 0, check_seed, "base seed of stochastic rounding", **_N)
    cache_weights: bool = _quantizer(
        "--cache-weights", False, _SWITCH, "quantize a weight once per optimizer step"
    )
    exclude: tuple[str, ...] = _option(
        *("layers", "--exclude", (), excludes.check),
        "layers to leave unquantized: output_layer, 'decoder.layers.0.*', 'qk:*.1.*'",
        metavar="[SITE:]GLOB",
    )
    include: tuple[str, ...] = _option(
        *("layers", "--include", (), excludes.check),
        "the only layers to quantize: 'decoder.layers.1?.*', 'linear:*.mlp.*'",
        metavar="[SITE:]GLOB",
    )
    every: int = _record(
        *("--record-every", 50, _check_count),
        "measure the quantizers in the first and every Nth iteration; 0: never",
        **_N,
    )
    gradient_noise: bool = _record(
        *("--gradient-noise", False, _SWITCH),
        "also measure the quantization noise of weight gradients",
    )
    dump: tuple[int, ...] = _record(
        *("--dump", (), _check_dump, "save the operands of this iteration, for `mqo stats`"),
        kind=int,
        metavar="ITERATION",
    )
    keep_checkpoints: int = _run(
        *(
            "--keep-last",
            0,
            _check_count,
            "number of newest checkpoints to keep; 0: all",
        ),
        shown="3 for standard, else all",
        **_N,
    )
    check_nan: bool = _run(
        "--check-nan", False, _SWITCH, "report the layer of the first NaN or Inf; slow"
    )


OPTIONS: dict[str, Option] = {
    f.name: replace(f.metadata["option"], name=f.name) for f in fields(Options)
}
TABLES = tuple(dict.fromkeys(option.table for option in OPTIONS.values()))


def check(options: dict[str, Any]) -> None:
    """Raise ValueError, naming the option and the valid ones, for an unknown name or value."""
    for name, value in options.items():
        check_choice("option", name, tuple(OPTIONS))
        check_value(OPTIONS[name].table, name, OPTIONS[name].check, value)


def check_value(table: str, name: str, checked: Callable[[object], object], value: object) -> None:
    """Run a check; its ValueError gets the table and key of quant.toml."""
    try:
        checked(value)
    except ValueError as error:
        raise ValueError(f"[{table}] {name}: {error}") from error
