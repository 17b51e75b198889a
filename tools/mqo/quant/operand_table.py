"""The tables of quant.toml for single operands and layers, which override the run's options.

[operands] has a row for each operand that differs, and [[rules]] a type for layers that match:

    [operands]
    "fprop.weight" = { tile = "square" }
    "wgrad.grad" = { rounding = "stochastic", hadamard = 16 }
    [[rules]]
    layers = "linear:decoder.layers.0.*"
    quant_type = "none"

The first rule that matches a layer applies. A rule never quantizes a site whose literal is 'none'.
This module imports only the standard library, because commands do not load torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mqo.quant import excludes
from mqo.quant.formats import (
    FAMILIES,
    HADAMARD_POINTS,
    HADAMARD_SIGNS,
    LINEAR,
    QUANT_TYPES,
    ROUNDINGS,
    SCALE_RULES,
    SITES,
    TILES,
    check_choice,
)

OPERANDS = tuple(f"{s.name}.{operand}" for s in SITES.values() for operand in (s.lhs, s.rhs))
LEAST_GAIN = 2.0**-10
_VALID: dict[str, tuple[Any, ...]] = {
    "quant_type": QUANT_TYPES,
    "tile": TILES,
    "scale_rule": SCALE_RULES,
    "rounding": ROUNDINGS,
    "hadamard": HADAMARD_POINTS,
    "signs": HADAMARD_SIGNS,
}


@dataclass(frozen=True)
class OperandRow:
    """What differs for one operand; None is the literal's type, and the run's choice.

    quant_type: a type of its own; 'none' leaves the operand unquantized. hadamard: the points of
    the transform along the contraction axis, and `signs` what it multiplies by first; equal for
    both operands of a GEMM. gain: what the operand is multiplied by before, and divided by after.
    """

    quant_type: str | None = None
    tile: str | None = None
    scale_rule: str | None = None
    rounding: str | None = None
    hadamard: int | None = None
    signs: str | None = None
    gain: float = 1.0

    def __post_init__(self) -> None:
        for name, valid in _VALID.items():
            if (value := getattr(self, name)) is not None:
                check_choice(name.replace("_", " "), value, valid)
        if type(self.gain) not in (int, float) or not LEAST_GAIN <= self.gain <= 1.0:
            raise ValueError(f"gain {self.gain!r} is none; valid: 2^-10 to 1.0")

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the fields that differ from the site's and the run's values."""
        return {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default
        }

    @property
    def is_plain(self) -> bool:
        """Whether the operand is quantized without a transform and a gain."""
        return self.hadamard is None and self.gain == 1.0


@dataclass(frozen=True)
class LayerRule:
    """The quant type of layers that match a pattern of excludes.py."""

    layers: str
    quant_type: str

    def __post_init__(self) -> None:
        excludes.check([self.layers])
        # A rule has one type for both operands, so it cannot be a type that needs two.
        named = tuple(name for name in QUANT_TYPES if member(name, "x") is not None)
        check_choice("quant type", self.quant_type, named)


PLAIN = OperandRow()


def parse_operands(table: object) -> dict[str, OperandRow]:
    """Read [operands]; ValueError, naming the valid ones, for what is none."""
    if not isinstance(table, dict):
        raise ValueError(f"operands = {table!r} should be a table, [operands]")
    found = {}
    for name, row in table.items():
        check_choice("operand", name, OPERANDS)
        found[name] = _row(f"operands.{name}", OperandRow, row)
    _check_operands(found)
    return found


def _check_operands(rows: Mapping[str, OperandRow]) -> None:
    """Raise ValueError unless the rows of a GEMM's two operands fit together."""
    for site in SITES.values():
        lhs, rhs = (rows.get(f"{site.name}.{op}", PLAIN) for op in (site.lhs, site.rhs))
        if (lhs.hadamard, lhs.signs) != (rhs.hadamard, rhs.signs):
            raise ValueError(
                f"the operands of {site.name} are transformed differently, and their product would "
                "be another; valid: the same hadamard and signs for both"
            )
        squares = "square" in (lhs.tile, rhs.tile)  # they would span heads and sequences
        if site.layer != LINEAR and (squares or not (lhs.is_plain and rhs.is_plain)):
            raise ValueError(
                f"{site.name} is no linear layer's: it takes no hadamard, no gain and no squares"
            )


def parse_rules(rules: object) -> tuple[LayerRule, ...]:
    """Read [[rules]]; raises as `parse_operands`."""
    if not isinstance(rules, list):
        raise ValueError(f"rules = {rules!r} should be a list of tables, [[rules]]")
    return tuple(_row("rules", LayerRule, rule) for rule in rules)


def rule_for(rules: Iterable[LayerRule], site: str, layer: str) -> LayerRule | None:
    """Return the first rule for `layer` at `site`."""
    return next((rule for rule in rules if excludes.matches(rule.layers, site, layer)), None)


def member(quant_type: str, operand: str) -> str | None:
    """Return the format of `operand` where a site's type is `quant_type`; None for 'mixed'."""
    family = FAMILIES.get(quant_type)
    if family is None:
        return quant_type
    return family.gradients if operand == "grad" else family.others


def _row(where: str, kind: type, table: object) -> Any:
    if not isinstance(table, dict):
        raise ValueError(f"{where} = {table!r} should be a table")
    names = tuple(f.name for f in fields(kind))
    for key in table:
        check_choice(f"key in {where}", key, names)
    try:
        return kind(**table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
