"""Recipes: files that say how each operand of the GEMMs is quantized.

A run's quant.toml has the resolved recipe; operand_table.py and layer_rules.py read it. Needs
pydantic.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from mqo.quant import excludes, formats, operand_table, table
from mqo.quant.config_checks import check_layers
from mqo.quant.formats import NONE, check_choice
from mqo.quant.layer_rules import Assigned, LayerRule
from mqo.quant.options import OPTIONS
from mqo.quant.options import check as check_options
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugins import PLUGINS
from mqo.quant.quant_config import QuantConfig
from mqo.quant.recipe_files import first_fault, path_of, with_recipes
from mqo.quant.recipe_operands import (
    INGREDIENTS,
    KEPT,
    LINEAR,
    LINEAR_SITES,
    OperandTable,
    Types,
)
from mqo.quant.recipe_rules import Rule

OUTPUT_LAYER = "output_layer"
# Keys for readers, which change nothing in a training.
DESCRIPTION = {"summary", "source", "family", "published", "deviations"}


class Recipe(OperandTable):
    """A recipe. `changes` lists its switched ingredients; `own` says that it is the user's file.

    `family` groups recipes in lists, and `published` is what is known about the loss, in a
    line; recipes of this package have both.
    `options` are its quantizer options. The LM head stays unquantized unless `output_layer`.
    `recipes` are those that rules name. `plugins` are files of quantizers, relative to the
    recipe's, and `plugin_options` the options of these quantizers by name.

    Examples:
        >>> recipe = Recipe.load("nvfp4")
        >>> recipe.types.wgrad, recipe.operands["wgrad.x"].hadamard
        ('nvfp4', 16)
    """

    name: str
    summary: str
    source: str
    family: str = ""
    published: str = ""
    deviations: tuple[str, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    plugin_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    recipes: dict[str, OperandTable] = Field(default_factory=dict)
    output_layer: bool = False
    own: bool = False
    changes: tuple[str, ...] = ()

    @field_validator("options")
    @classmethod
    def _of_quantizers(cls, options: dict[str, Any]) -> dict[str, Any]:
        check_options(options)
        for name in options:
            if OPTIONS[name].table != "quantizer":
                raise ValueError(f"'{name}' is not an option of the quantizers")
        return options

    @model_validator(mode="after")
    def _is_consistent(self) -> Recipe:
        if self.operands and not self.types.of_attention:
            linear = [n for n in operand_table.OPERANDS if n.partition(".")[0] in LINEAR_SITES]
            for name in self.operands.keys() - {*linear}:
                raise ValueError(
                    f"operands: '{name}' needs a type for qk or pv in [types]; valid without one: "
                    f"{', '.join(linear)}"
                )
        for rule in self.rules:
            site = excludes.split(rule.layers)[0]
            if rule.layers and site is not None and not self._has_type(site):
                raise ValueError(
                    f"'{rule.layers}' is for {site}, which has no type; valid: layers of a site "
                    "with a type"
                )
        for name, values in self.plugin_options.items():
            check_choice("quantizer of the recipe", name, sorted(self.own_types()))
            PLUGINS[name].with_defaults(values)
        self.resolved()
        types = self.types.model_dump()
        check_layers(replace(self.config(), asked=types, rules=self.layer_rules()))
        self.check_used(self._ruled_types)
        for name, own in self.recipes.items():
            try:
                self.resolved(Assigned(recipe=name))
                own.check_used(lambda site: set())
            except ValueError as error:
                raise ValueError(f"recipe {name}: {error}") from None
        return self

    def _has_type(self, name: str) -> bool:
        """Return whether a site, or one of a kind of sites, has a type."""
        sites = [s.name for s in formats.SITES.values() if name in (s.name, s.layer)]
        return any(getattr(self.types, site) != NONE for site in sites)

    def _ruled_types(self, site: formats.GemmSite) -> set[str]:
        """Return the types that rules give layers of a site."""
        return {
            rule.quant_type
            for rule in self.layer_rules()
            if rule.quant_type and excludes.is_for(rule.layers, site)
        }

    @property
    def tables(self) -> tuple[OperandTable, ...]:
        """Return the types and rows of layers without a rule, and those of the rules' recipes."""
        return self, *self.recipes.values()

    @property
    def scope(self) -> str:
        """Return the site, or kind of sites, of patterns that name none: '' for all."""
        return "" if self.types.of_attention else f"{LINEAR}:"

    def own_types(self) -> set[str]:
        """Return the names of the custom quantizers that are types of the recipe."""
        return self.all_types() & PLUGINS.keys()

    def all_types(self) -> set[str]:
        """Return the types of the recipe's sites, operands and rules."""
        return {*self.config().all_types()} | {rule.quant_type or NONE for rule in self.rules}

    def config(self) -> QuantConfig:
        """Return the options of a model with this recipe in all layers: without its rules."""
        return QuantConfig(
            asked=self.types.by_site(),
            operands=self.operands,
            recipes={name: own.layer_recipe() for name, own in self.recipes.items()},
            plugins={n: PluginRow(options=values) for n, values in self.plugin_options.items()},
            **self.options,
        )

    def resolved(self, assigned: Assigned | None = None) -> dict[tuple[str, str], Any]:
        """Return {(site, operand): OperandSpec of mqo.quant} of all layers without a rule.

        `assigned` are the layers to which a rule gives this.

        Raises:
            ValueError: an operand of a 'mixed' site has no type.
        """
        options = self.config()
        sites = [formats.SITES[name] for name in options.asked]
        return {
            (site.name, operand): options.spec_in(
                site.name, operand, options.asked[site.name], assigned
            )
            for site in sites
            for operand in (site.lhs, site.rhs)
        }

    def ruled(self, rule: Rule) -> list[str]:
        """Return how the operands of a rule's layers are quantized, in words."""
        config = replace(self.config(), rules=tuple(rule.rows(self.scope)))
        return sorted({entry.choices for entry in table.entries(config) if entry.assigned})

    @property
    def label(self) -> str:
        """Return the name for tables and plots, with the switched ingredients."""
        name = f"{self.name} recipe"
        return " ".join((f"{name} {self.digest}" if self.own else name, *self.changes))

    @property
    def digest(self) -> str:
        """Return a hash that distinguishes files of the same name."""
        texts = {"name", "summary", "source", "family", "published", "deviations"}
        texts |= {"own", "changes", "plugins"}
        content = self.model_dump_json(exclude=texts, exclude_defaults=True)
        return hashlib.sha256(content.encode()).hexdigest()[:6]

    @property
    def ingredients(self) -> tuple[str, ...]:
        """Return the ingredients that can be switched off."""
        ingredients = set().union(*(own.ingredients_of() for own in self.tables))
        ingredients |= {KEPT} if any(rule.keeps for rule in self.rules) else set()
        return tuple(name for name in INGREDIENTS if name in ingredients)

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Recipe:
        """Return the recipe of that name, or of FILE.toml, and run the files of its quantizers.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: there is no such name, or the file is not a valid recipe; the text says why.
            QuantizerError: a file of quantizers cannot be run.
        """
        name = os.fspath(name)
        path = path_of(name)
        try:
            keys = with_recipes(path, _keys(path), _keys)
            if keys["plugins"]:
                from mqo.quant.plugin_file import load_quantizers  # imports torch

                for file in keys["plugins"]:
                    load_quantizers(Path(file))
            return cls.from_table(name, keys)
        except ValueError as error:
            raise ValueError(f"{path}: {first_fault(error)}") from None

    @classmethod
    def from_table(cls, name: str, keys: Mapping[str, Any]) -> Recipe:
        """Return the recipe of a file with these keys of `with_recipes`; ValueError if invalid.

        `name` is that of a recipe, or FILE.toml, the user's own. Its own quantizers must be types.
        """
        path = path_of(name)
        for key in ("name", "changes", "own"):
            if key in keys:
                raise ValueError(f"{key} cannot be set in a file; the name is that of the file")
        own, shown = name.endswith(".toml"), {"summary": "", "source": str(path)}
        for key in ("family", "published"):
            if not (own or keys.get(key)):
                raise ValueError(f"{key} is missing; valid: a text, in each recipe of this package")
        return cls(name=path.stem, own=own, **shown | dict(keys))

    @classmethod
    def of_type(cls, quant_type: str) -> Recipe:
        """Return the recipe that quantizes all operands of all layers to a type."""
        types = Types(**dict.fromkeys(LINEAR_SITES, quant_type))
        source = "formats.toml"
        return cls(name=quant_type, summary="", source=source, types=types, output_layer=True)

    def without(self, ingredient: str) -> Recipe:
        """Return a copy without one of its `ingredients`; ValueError if it lacks that one."""
        check_choice(f"ingredient of {self.name}", ingredient, self.ingredients)
        recipes = {n: own.without_ingredient(ingredient) for n, own in self.recipes.items()}
        update = {
            "rules": tuple(r for r in self.rules if not (ingredient == KEPT and r.keeps)),
            "recipes": recipes,
            "changes": (*self.changes, f"without {ingredient}"),
        }
        changed: Recipe = self.without_ingredient(ingredient).model_copy(update=update)
        return changed

    def with_output_layer(self) -> Recipe:
        """Return a copy that quantizes the LM head."""
        changes = (*self.changes, f"with {OUTPUT_LAYER}")
        return self.model_copy(update={"output_layer": True, "changes": changes})

    def layer_rules(self, blocks: Sequence[Iterable[int]] | None = None) -> tuple[LayerRule, ...]:
        """Return the rules of quant.toml that the recipe has, as `Rule.rows` does."""
        return tuple(row for rule in self.rules for row in rule.rows(self.scope, blocks=blocks))

    def rows(self, blocks: Sequence[Iterable[int]]) -> dict[str, Any]:
        """Return the rows of quant.toml for a model with these layers in each block, by table.

        A share of blocks that rounds to none has no rule, and a recipe without a rule no rows.
        """
        rules = [rule.as_table() for rule in self.all_rules(blocks)]
        named = {rule.get("recipe") for rule in rules}
        recipes = {
            n: own.layer_recipe().as_table() for n, own in self.recipes.items() if n in named
        }
        operands = {name: row.chosen for name, row in self.operands.items()}
        return {"operands": operands, "rules": rules, "recipes": recipes}

    def all_rules(self, blocks: Sequence[Iterable[int]]) -> Iterator[LayerRule]:
        """Yield the rules of quant.toml for a model with these layers in each block."""
        yield from self.layer_rules(blocks)
        if not self.output_layer and self.types.of_linear:
            yield LayerRule(f"{LINEAR}:{OUTPUT_LAYER}", NONE)


def _keys(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
