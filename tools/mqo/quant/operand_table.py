"""The table of quant.toml for single operands, which overrides the run's options.

[operands] has a row for each operand with other options:

    [operands]
    "fprop.weight" = { tile = "square" }
    "wgrad.grad" = { rounding = "stochastic", hadamard = 16 }
    "wgrad.x" = { source = "fprop" }
    "dgrad.weight" = { options = { rounding = "stochastic" } }

This module imports only the standard library, because commands do not load torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mqo.quant.formats import (
    FAMILIES,
    HADAMARD_POINTS,
    HADAMARD_SIGNS,
    LINEAR,
    ROUNDINGS,
    SCALE_RULES,
    SITES,
    TILES,
    check_choice,
    check_type,
)
from mqo.quant.plugins import is_value

OPERANDS = tuple(f"{s.name}.{operand}" for s in SITES.values() for operand in (s.lhs, s.rhs))
LEAST_GAIN, LARGEST_GAIN = 2.0**-10, 2.0
FPROP = "fprop"
WGRAD = "wgrad"
GRADIENTS = ("grad", "ds")
# The operands of the backward pass that the forward pass rounds, too.
_ROUNDED_IN_FPROP = ("dgrad.weight", "wgrad.x")
_VALID: dict[str, tuple[Any, ...]] = {
    "tile": TILES,
    "scale_rule": SCALE_RULES,
    "rounding": ROUNDINGS,
    "hadamard": HADAMARD_POINTS,
    "signs": HADAMARD_SIGNS,
    "source": (FPROP,),
}


@dataclass(frozen=True)
class OperandRow:
    """The differences of one operand; None is for the site's type or the run's option.

    quant_type: the operand's type; 'none' leaves it unquantized. hadamard: the points of the
    transform along the contraction axis; signs: its signs. Both are equal for both operands of a
    GEMM. gain: the factor before rounding; the result is divided by it. source: 'fprop' takes the
    values to which the forward pass rounded the operand, and rounds them again unless the type is
    'none'. options: those of a custom quantizer that differ from the run's.
    """

    quant_type: str | None = None
    tile: str | None = None
    scale_rule: str | None = None
    rounding: str | None = None
    hadamard: int | None = None
    signs: str | None = None
    gain: float = 1.0
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quant_type is not None:
            check_type(self.quant_type)
        for name, valid in _VALID.items():
            if (value := getattr(self, name)) is not None:
                check_choice(name.replace("_", " "), value, valid)
        if type(self.gain) not in (int, float) or not LEAST_GAIN <= self.gain <= LARGEST_GAIN:
            raise ValueError(f"invalid gain {self.gain!r}; valid: 2^-10 to 2.0")
        if not isinstance(self.options, Mapping) or not all(map(is_value, self.options.values())):
            raise ValueError(f"invalid options {self.options!r}; valid: {{ option = value }}")

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(PLAIN, name)}

    @property
    def is_plain(self) -> bool:
        """Whether the operand has no transform and no gain."""
        return self.hadamard is None and self.gain == 1.0


PLAIN = OperandRow()


def parse_operands(table: object) -> dict[str, OperandRow]:
    """Read [operands]; raise a ValueError that names the valid keys and values."""
    if not isinstance(table, dict):
        raise ValueError(f"operands = {table!r} should be a table, [operands]")
    rows = {}
    for name, row in table.items():
        check_choice("operand", name, OPERANDS)
        rows[name] = row_of(f"operands.{name}", OperandRow, row)
    _check_operands(rows)
    return rows


def _check_operands(rows: Mapping[str, OperandRow]) -> None:
    """Raise ValueError unless the rows of a GEMM's two operands are compatible."""
    for name, row in rows.items():
        if row.source and name not in _ROUNDED_IN_FPROP:
            raise ValueError(
                f"{name} has a source; valid: source for {' and '.join(_ROUNDED_IN_FPROP)}, which "
                "the forward pass rounds, too"
            )
    for site in SITES.values():
        lhs, rhs = (rows.get(f"{site.name}.{op}", PLAIN) for op in (site.lhs, site.rhs))
        if (lhs.hadamard, lhs.signs) != (rhs.hadamard, rhs.signs):
            raise ValueError(
                f"the operands of {site.name} have different transforms, which would change their "
                "product; valid: the same hadamard and signs for both"
            )
        if site.layer != LINEAR and not lhs.gain == rhs.gain == 1.0:
            raise ValueError(f"{site.name} is not a site of linear layers; valid: no gain")


def member(quant_type: str, operand: str) -> str | None:
    """Return the format of `operand` if the site's type is `quant_type`; None for 'mixed'."""
    family = FAMILIES.get(quant_type)
    if family is None:
        return quant_type
    return family.gradients if operand in GRADIENTS else family.others


def row_of(where: str, kind: type, table: object) -> Any:
    """Return a table as a row of this class; raise a ValueError that names the valid keys."""
    if not isinstance(table, dict):
        raise ValueError(f"{where} = {table!r} should be a table")
    names = tuple(f.name for f in fields(kind))
    for key in table:
        check_choice(f"key in {where}", key, names)
    try:
        return kind(**table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
