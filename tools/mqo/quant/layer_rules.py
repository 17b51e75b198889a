"""The rules of quant.toml: layers with a quant type, or with a recipe, of their own.

    [[rules]]
    layers = "linear:decoder.layers.0.*"
    quant_type = "none"
    [[rules]]
    layers = "linear:*"
    parts = ["qkv"]
    recipe = "mxfp8"
    [recipes]
    mxfp8 = { types = { fprop = "mxfp8" }, operands = { "fprop.x" = { scale_rule = "rceil" } } }

The first rule that matches a layer applies. A rule never quantizes a site whose literal is 'none'.
This module imports only the standard library, because commands do not load torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from mqo.quant import excludes
from mqo.quant.formats import LINEAR, NONE, SITES, check_choice, check_type, types
from mqo.quant.operand_table import PLAIN, OperandRow, member, parse_operands, row_of

# The layers of each part of a transformer block, by the names of Megatron and of transformers.
PARTS: dict[str, tuple[str, ...]] = {
    "qkv": (
        *("*.linear_qkv", "*.linear_q_*", "*.linear_kv_*"),
        *("*.[qkv]_proj", "*.qkv_proj", "*.q_[ab]_proj", "*.kv_[ab]_proj*"),
    ),
    "proj": ("*.linear_proj", "*.o_proj"),
    "fc1": ("*.linear_fc1", "*.gate_proj", "*.up_proj", "*.gate_up_proj"),
    "fc2": ("*.linear_fc2", "*.down_proj"),
    "experts": ("*.mlp.experts.*",),
    "shared_experts": ("*.mlp.shared_expert*",),
}
_ROUTER = "router"


class Assigned(NamedTuple):
    """What a rule gives its layers: a quant type, or else a recipe."""

    quant_type: str | None = None
    recipe: str | None = None


UNQUANTIZED = Assigned(NONE)


@dataclass(frozen=True)
class LayerRule:
    """The quant type, or the recipe, of layers.

    layers: a pattern of excludes.py. parts: names in PARTS; the layers must be one of them.
    """

    layers: str
    quant_type: str | None = None
    recipe: str | None = None
    parts: Sequence[str] = ()

    def __post_init__(self) -> None:
        excludes.check([self.layers])
        check_assigned(self.quant_type, self.recipe)
        check_parts(self.parts)
        object.__setattr__(self, "parts", tuple(self.parts))

    @property
    def assigned(self) -> Assigned:
        """Return what the rule gives its layers."""
        return Assigned(self.quant_type, self.recipe)

    @property
    def text(self) -> str:
        """Return the rule in words, as checkpoints keep it."""
        parts = f" {'+'.join(self.parts)}" if self.parts else ""
        given = f"recipe {self.recipe}" if self.recipe else str(self.quant_type)
        return f"{self.layers}{parts} {given}"

    def as_table(self) -> dict[str, Any]:
        """Return the rule for quant.toml, without empty values."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}

    def matches(self, site: str, layer: str) -> bool:
        """Return whether the rule is for `layer` at `site`."""
        if not excludes.matches(self.layers, site, layer):
            return False
        return not self.parts or (SITES[site].layer == LINEAR and is_part(layer, self.parts))


def is_part(layer: str, parts: Iterable[str]) -> bool:
    """Return whether a linear layer is one of these parts of a block."""
    return any(fnmatchcase(layer, glob) for part in parts for glob in PARTS[part])


def check_assigned(quant_type: str | None, recipe: str | None) -> None:
    """Raise ValueError unless a rule has a valid quant type, or a recipe."""
    if (quant_type is None) == (recipe is None):
        raise ValueError("a rule needs either quant_type or recipe")
    if quant_type is not None:
        # A rule gives one type to both operands, so it cannot be 'mixed'.
        named = tuple(name for name in types() if member(name, "x") is not None)
        check_choice("quant type", quant_type, named)
    elif not isinstance(recipe, str) or not recipe:
        raise ValueError(f"recipe = {recipe!r}; valid: the name of a recipe")


def check_parts(parts: object) -> None:
    """Raise ValueError, naming the valid ones, for parts that no rule can have."""
    if not isinstance(parts, list | tuple) or not all(isinstance(name, str) for name in parts):
        raise ValueError(f"parts = {parts!r}; valid: a list of {', '.join(PARTS)}")
    for part in parts:
        if part == _ROUTER:
            raise ValueError(f"routers have no quantization site; valid: {', '.join(PARTS)}")
        check_choice("part of a block", part, tuple(PARTS))


@dataclass(frozen=True)
class LayerRecipe:
    """The types of the sites, and the rows of their operands, in the layers of a rule."""

    types: Mapping[str, str] = field(default_factory=dict)
    operands: Mapping[str, OperandRow] = field(default_factory=dict)

    def type_at(self, site: str) -> str:
        """Return the type of a site."""
        return self.types.get(site, NONE)

    def row(self, site: str, operand: str) -> OperandRow:
        """Return the differences of an operand from the defaults of its type."""
        return self.operands.get(f"{site}.{operand}", PLAIN)

    def as_table(self) -> dict[str, Any]:
        """Return the recipe for quant.toml, without rows that change nothing."""
        rows = {name: row.chosen for name, row in self.operands.items() if row.chosen}
        return {"types": dict(self.types)} | ({"operands": rows} if rows else {})

    def all_types(self) -> set[str]:
        """Return the types of sites and of operands."""
        return {*self.types.values()} | {row.quant_type or NONE for row in self.operands.values()}


def parse_rules(rules: object) -> tuple[LayerRule, ...]:
    """Read [[rules]]; raise a ValueError that names the valid keys and values."""
    if not isinstance(rules, list):
        raise ValueError(f"rules = {rules!r} should be a list of tables, [[rules]]")
    return tuple(row_of("rules", LayerRule, rule) for rule in rules)


def parse_recipes(table: object) -> dict[str, LayerRecipe]:
    """Read [recipes]; raise as `parse_rules`."""
    if not isinstance(table, dict):
        raise ValueError(f"recipes = {table!r} should be a table, [recipes]")
    return {name: _layer_recipe(name, row) for name, row in table.items()}


def _layer_recipe(name: str, row: Any) -> LayerRecipe:
    recipe: LayerRecipe = row_of(f"recipes.{name}", LayerRecipe, row)
    if not isinstance(recipe.types, dict):
        raise ValueError(f"recipes.{name}.types = {recipe.types!r} should be a table")
    for site, quant_type in recipe.types.items():
        check_choice(f"GEMM site of recipes.{name}", site, tuple(SITES))
        check_type(quant_type)
    return LayerRecipe(recipe.types, parse_operands(recipe.operands))


def rule_for(rules: Iterable[LayerRule], site: str, layer: str) -> LayerRule | None:
    """Return the first rule for `layer` at `site`."""
    return next((rule for rule in rules if rule.matches(site, layer)), None)
