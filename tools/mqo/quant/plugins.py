"""Custom quantizers: functions in Python that are types, like the formats of formats.toml.

A command knows what a quantizer declares, and not its function: it does not run the file.
This module imports only the standard library, because commands do not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite, lcm
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    # Of x and its QuantizerContext.
    Term = Tensor | tuple[Tensor, float | Tensor]
    Function = Callable[[Tensor, Any], Term | list[Term]]
    # Of the gradient of an operand, the operand, and its QuantizerContext.
    Estimate = Callable[[Tensor, Tensor, Any], Tensor]
    # Of the state, the notes, the number of the step and the options, to the next state.
    Update = Callable[[dict[str, Tensor], dict[str, Tensor], int, "Options"], dict[str, Tensor]]

Options = Mapping[str, Any]  # of a quantizer: each value is a bool, int, float or str

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BLOCKS = range(1, 4097)
_TERMS = range(1, 5)
# Words that mean something else where a type is expected.
_RESERVED = ("all", "bf16", "fp16", "fp32", "none", "source", "then", "until")
NAMES = "lower-case letters, digits and _, beginning with a letter, other than " + ", ".join(
    _RESERVED
)
MOST_VALUES = 1024  # of a state
_CODE = ("name", "function", "update", "estimate")  # fields that are not declared


def is_value(value: object) -> bool:
    """Return whether an option may have this value: JSON and TOML keep it, also as a float."""
    if type(value) is str:
        return value.isprintable()
    if type(value) is int:
        return abs(value) < 1 << 63
    return type(value) is bool or (type(value) is float and isfinite(value))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and is_value(value)


def is_name(name: str) -> bool:
    """Return whether a quantizer may have this name."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


@dataclass(frozen=True)
class Plugin:
    """A quantizer and what it declares; `plugin_decorators.quantizer` explains the fields.

    `function` is None for a quantizer whose code has not been run. `update` computes its next
    state, and `estimate` the gradient of an operand.
    """

    name: str
    block: int | None = None
    square: bool = False
    needs_tensor_amax: bool = False
    stochastic: bool = False
    independent_rows: bool = False
    options: Options = field(default_factory=dict)
    state: Mapping[str, float | list[float]] = field(default_factory=dict)
    estimator: bool = False
    terms: int = 1
    idempotent: bool = True
    multiple: int = 1
    function: Function | None = field(default=None, compare=False, repr=False)
    update: Update | None = field(default=None, compare=False, repr=False)
    estimate: Estimate | None = field(default=None, compare=False, repr=False)

    # The attributes of `Format` that specs and plots read.
    is_mx = False
    scale_rules = ()
    light = "#8a3fc0"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_name(self.name):
            raise ValueError(f"invalid name {self.name!r} of a quantizer; valid: {NAMES}")
        if self.block is not None and (type(self.block) is not int or self.block not in _BLOCKS):
            raise ValueError(f"invalid block {self.block!r} of {self.name}; valid: 1 to 4096")
        for name in (f.name for f in fields(self) if f.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"invalid {name} of {self.name}; valid: True or False")
        if type(self.multiple) is not int or self.multiple not in _BLOCKS:
            raise ValueError(f"invalid multiple {self.multiple!r} of {self.name}; valid: 1 to 4096")
        if type(self.terms) is not int or self.terms not in _TERMS:
            raise ValueError(f"invalid terms {self.terms!r} of {self.name}; valid: 1 to 4")
        if self.terms > 1 and self.independent_rows:
            raise ValueError(
                f"{self.name} has several terms and independent rows; valid: independent_rows=False"
            )
        if self.square and self.block is None:
            raise ValueError(f"{self.name} has squares, and no block; valid: square with a block")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"invalid options of {self.name}; valid: a dict of default values")
        for name, value in self.options.items():
            if not (is_value(value) and isinstance(name, str) and is_name(name)):
                raise ValueError(
                    f"invalid option {name!r} = {value!r} of {self.name}; valid: a name, and a "
                    "bool, int, finite float or printable str"
                )
        if not isinstance(self.state, Mapping):
            raise ValueError(f"invalid state of {self.name}; valid: a dict of initial values")
        for name, value in self.state.items():
            numbers = value if isinstance(value, list) else [value]
            valid = 0 < len(numbers) <= MOST_VALUES and all(map(_is_number, numbers))
            if not (valid and isinstance(name, str) and is_name(name)):
                raise ValueError(
                    f"invalid state {name!r} of {self.name}; valid: a name, and a finite float or "
                    f"a list of at most {MOST_VALUES}"
                )

    def multiple_after(self, points: int) -> int:
        """Return what must divide K, the elements that a GEMM sums over.

        That is the declared multiple. An estimator after a Hadamard transform of that many `points`
        (1 without a transform) also needs whole blocks: their gradients are transformed back.
        """
        return lcm(self.multiple, points if self.estimator else 1)

    def size_fault(self, size: int, points: int = 1) -> str:
        """Return why K = `size` elements after a transform of `points` are refused, or ''."""
        multiple = self.multiple_after(points)
        if not size % multiple:
            return ""
        why = f", because it computes gradients after a transform of {points}"
        needed = why if self.multiple % multiple else ""
        return f"{self.name} needs a multiple of {multiple}{needed}"

    @property
    def rounding(self) -> str:
        """The rounding of its specs: it decides whether a seed is needed."""
        return "stochastic" if self.stochastic else "nearest-even"

    @property
    def declaration(self) -> dict[str, Any]:
        """What it declares beyond the defaults, by field."""
        bare = Plugin(self.name)
        names = [f.name for f in fields(self) if f.name not in _CODE]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value != getattr(bare, name)}

    def with_defaults(self, chosen: Options) -> dict[str, Any]:
        """Return all options, the chosen ones and defaults, sorted by name.

        Raises:
            ValueError: an option is unknown, or its value has another type than the default.
        """
        for name, value in chosen.items():
            if name not in self.options:
                valid = ", ".join(self.options) or "none"
                raise ValueError(f"unknown option {name!r} of {self.name}; valid: {valid}")
            kind = type(self.options[name])
            matches = type(value) is kind or (type(value), kind) == (int, float)
            if not (matches and is_value(value)):
                raise ValueError(
                    f"{name} = {value!r} of {self.name} is not of type {kind.__name__}; valid: "
                    f"values like {self.options[name]!r}"
                )
        values = {n: type(v)(chosen.get(n, v)) for n, v in self.options.items()}
        return dict(sorted(values.items()))


PLUGINS: dict[str, Plugin] = {}
_registered = 0


def register_plugin(plugin: Plugin) -> None:
    """Make a quantizer a type, in place of an older one with the same name."""
    note_registration()
    PLUGINS[plugin.name] = plugin


def note_registration() -> None:
    """Count a type of a user, a quantizer or a format."""
    global _registered
    _registered += 1


def registrations() -> int:
    """Return the number of types that were registered: what was read before may be outdated."""
    return _registered
