"""The types of a recipe's GEMMs, and the rows of their operands. Needs pydantic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from pydantic import Field, field_validator, model_validator

from mqo.quant import formats, operand_table
from mqo.quant.formats import NONE
from mqo.quant.frozen_model import FrozenModel
from mqo.quant.layer_rules import LayerRecipe
from mqo.quant.plugins import PLUGINS

HADAMARD, STOCHASTIC, SQUARE, KEPT = "hadamard", "stochastic", "2d", "kept-blocks"
INGREDIENTS = (HADAMARD, STOCHASTIC, SQUARE, KEPT)
LINEAR = formats.LINEAR
LINEAR_SITES = tuple(name for name, site in formats.SITES.items() if site.layer == LINEAR)
ATTENTION_SITES = tuple(name for name in formats.SITES if name not in LINEAR_SITES)
OperandRow = operand_table.OperandRow


class Types(FrozenModel):
    """The types of the sites, for the literals in the source."""

    fprop: str = NONE
    dgrad: str = NONE
    wgrad: str = NONE
    qk: str = NONE
    pv: str = NONE
    qk_recompute: str = NONE
    dv: str = NONE
    dp: str = NONE
    dq: str = NONE
    dk: str = NONE

    @field_validator("*")
    @classmethod
    def _known(cls, quant_type: str) -> str:
        formats.check_type(quant_type)
        return quant_type

    @property
    def of_attention(self) -> bool:
        """Return whether a product of attention has a type."""
        return any(getattr(self, site) != NONE for site in ATTENTION_SITES)

    @property
    def of_linear(self) -> bool:
        """Return whether a GEMM of linear layers has a type."""
        return any(getattr(self, site) != NONE for site in LINEAR_SITES)

    def by_site(self) -> dict[str, str]:
        """Return {site: type} of linear layers, and of attention if it has a type."""
        sites = (*LINEAR_SITES, *ATTENTION_SITES) if self.of_attention else LINEAR_SITES
        return formats.chosen_types({site: getattr(self, site) for site in sites})


class OperandTable(FrozenModel):
    """The types of the GEMMs, and the rows of their operands: a recipe for the layers of a rule."""

    types: Types
    operands: dict[str, OperandRow] = Field(default_factory=dict)

    @field_validator("operands", mode="before")
    @classmethod
    def _fit(cls, operands: Any) -> Any:
        """Parse the operands as a run does."""
        if not isinstance(operands, dict):
            return operand_table.parse_operands(operands)
        plain = {n: asdict(r) if isinstance(r, OperandRow) else r for n, r in operands.items()}
        return operand_table.parse_operands(plain)

    @model_validator(mode="after")
    def _quantizes(self) -> OperandTable:
        if set(self.types.model_dump().values()) == {NONE}:
            raise ValueError("all types are 'none'; valid: a type for fprop, dgrad or wgrad")
        return self

    def layer_recipe(self) -> LayerRecipe:
        """Return the same for the options of a run."""
        return LayerRecipe(self.types.by_site(), self.operands)

    def ingredients_of(self) -> set[str]:
        """Return the ingredients of operands that can be switched off."""
        operands = self.operands
        return {n for n in INGREDIENTS if self.without_ingredient(n).operands != operands}

    def without_ingredient(self, ingredient: str) -> Any:
        """Return a copy whose operands lack an ingredient."""
        scales = {row.gain for row in self.operands.values() if row.rounding != STOCHASTIC}
        operands = {name: _without(row, ingredient, scales) for name, row in self.operands.items()}
        return self.model_copy(update={"operands": operands})

    def check_used(self, ruled: Callable[[formats.GemmSite], set[str]]) -> None:
        """Raise ValueError for a key of a row that no format of its operand reads.

        `ruled` returns the types that rules give other layers of a site.
        """
        for name, row in self.operands.items():
            site, _, operand = name.partition(".")
            types = {NONE}
            if (of_site := getattr(self.types, site)) != NONE:
                kinds = {row.quant_type or of_site} | ruled(formats.SITES[site])
                types = {operand_table.member(kind, operand) or NONE for kind in kinds}
            if idle := _idle(row, types):
                raise ValueError(f"operands.{name}: {idle}")


def _idle(row: OperandRow, types: set[str]) -> str:
    """Return a clause on keys of a row that have no effect with these formats, or ''.

    A transform also applies to an unquantized operand, to undo that of the other operand.
    """
    row_formats = [formats.format_of(kind) for kind in types if kind != NONE]
    if row.signs and row.hadamard is None:
        return f"signs = '{row.signs}' needs a transform, and hadamard is not set"
    if not row_formats and (
        unread := sorted(row.chosen.keys() - {"quant_type", "hadamard", "signs", "source"})
    ):
        return f"{', '.join(unread)} needs a quantized operand, and its type is 'none'"
    kinds = ", ".join(sorted(types - {NONE}))
    if row.options and not types & PLUGINS.keys():
        return f"options are those of a custom quantizer, which {kinds} is not"
    if row.tile == "square" and not any(kind.square for kind in row_formats):
        return f"{kinds} has no square tiles"
    rules = [*dict.fromkeys(rule for kind in row_formats for rule in kind.scale_rules)]
    if row.scale_rule and row.scale_rule not in rules:
        return f"{kinds} has {_rules_text(rules)}"
    return ""


def _rules_text(rules: list[str]) -> str:
    return f"the scale rules {', '.join(rules)}" if rules else "only one scale rule"


def _without(row: OperandRow, ingredient: str, scales: set[float]) -> OperandRow:
    """Return an operand without an ingredient; unchanged if it lacks that one.

    `scales` are the gains that are a part of the scale: those of operands that round to nearest.
    Any other gain below 1 makes room for rounding up, and has no use without it.
    """
    room = {"gain": max(row.gain, 1.0)} if row.gain not in scales else {}
    left_out: dict[str, dict[str, Any]] = {
        HADAMARD: {"hadamard": None, "signs": None},
        STOCHASTIC: {"rounding": None, **room} if row.rounding == STOCHASTIC else {},
        SQUARE: {"tile": None},
    }
    return replace(row, **left_out.get(ingredient, {}))
