"""Recipes: files that say how each operand of the linear layers is quantized.

A run's quant.toml has the resolved recipe; operand_table.py reads it. Needs pydantic.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mqo.quant import excludes, formats, operand_table, table
from mqo.quant.config import QuantConfig, check_packed, check_sources
from mqo.quant.formats import NONE, check_choice
from mqo.quant.frozen_model import FrozenModel
from mqo.quant.options import OPTIONS
from mqo.quant.options import check as check_options
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugins import PLUGINS

HERE = Path(formats.__file__).with_name("recipes")
HADAMARD, STOCHASTIC, SQUARE, KEPT = "hadamard", "stochastic", "2d", "kept-blocks"
INGREDIENTS = (HADAMARD, STOCHASTIC, SQUARE, KEPT)
OUTPUT_LAYER = "output_layer"
LINEAR = formats.LINEAR
LINEAR_SITES = tuple(name for name, site in formats.SITES.items() if site.layer == LINEAR)
OperandRow = operand_table.OperandRow


def _check_end(end: Any) -> Any:
    # bool is an int in Python, and comparisons with NaN are false.
    if type(end) not in (int, float) or not 0 <= end < (1.0 if type(end) is float else 2**16):
        raise ValueError(f"{end!r} is not valid; valid: a number of blocks, or a share below 1.0")
    return end


class Rule(FrozenModel):
    """The type of some layers: those of a pattern as in `--exclude`, or blocks at either end.

    `first` and `last` are numbers of transformer blocks, or shares of all blocks.
    """

    quant_type: str
    layers: str = ""
    first: Annotated[int | float, BeforeValidator(_check_end)] = 0
    last: Annotated[int | float, BeforeValidator(_check_end)] = 0

    @model_validator(mode="after")
    def _one_kind(self) -> Rule:
        if bool(self.layers) == self.is_of_ends:
            raise ValueError("a rule needs either layers, or first and last")
        operand_table.LayerRule(self.pattern or "linear:*", self.quant_type)
        site = excludes.split(self.pattern)[0]
        if self.pattern and site not in (LINEAR, *LINEAR_SITES):
            raise ValueError(f"'{self.layers}' is for {site}; valid: layers of the linear sites")
        return self

    @property
    def pattern(self) -> str:
        """Return the pattern, for the linear sites if it names no site."""
        bare = self.layers and ":" not in self.layers
        return f"{LINEAR}:{self.layers}" if bare else self.layers

    @property
    def is_of_ends(self) -> bool:
        """Return whether the rule is for blocks at the ends."""
        return bool(self.first or self.last)

    @property
    def keeps(self) -> bool:
        """Return whether the rule keeps blocks unquantized."""
        return self.is_of_ends and self.quant_type == NONE

    def blocks(self, count: int) -> list[int]:
        """Return the rule's blocks out of `count`, from 0; shares are rounded, halves up."""
        ends = (self.first, self.last)
        first, last = (
            int(end * count + 0.5) if isinstance(end, float) else min(end, count) for end in ends
        )
        return sorted({*range(first), *range(count - last, count)})

    def rows(self, count: int) -> Iterator[dict[str, str]]:
        """Yield the rules of quant.toml for a model with `count` transformer blocks."""
        patterns = [f"linear:decoder.layers.{block}.*" for block in self.blocks(count)]
        for pattern in patterns if self.is_of_ends else [self.pattern]:
            yield {"layers": pattern, "quant_type": self.quant_type}


class Types(FrozenModel):
    """The types of the linear sites, for the literals in the source."""

    fprop: str = NONE
    dgrad: str = NONE
    wgrad: str = NONE

    @field_validator("*")
    @classmethod
    def _known(cls, quant_type: str) -> str:
        formats.check_type(quant_type)
        return quant_type


class Recipe(FrozenModel):
    """A recipe. `changes` lists its switched ingredients; `own` says that it is the user's file.

    `options` are its quantizer options. The LM head stays unquantized unless `output_layer`.
    `plugins` are files of quantizers, relative to the recipe's, and `plugin_options` the options of
    these quantizers by name.
    """

    name: str
    summary: str
    source: str
    types: Types
    deviations: tuple[str, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    operands: dict[str, OperandRow] = Field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    plugin_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
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

    @field_validator("operands", mode="before")
    @classmethod
    def _fit(cls, operands: Any) -> Any:
        """Parse the operands as a run does; ValueError for operands of attention."""
        rows = operands if isinstance(operands, dict) else {}
        linear = [n for n in operand_table.OPERANDS if n.partition(".")[0] in LINEAR_SITES]
        for name in rows.keys() - {*linear}:
            raise ValueError(f"'{name}' is not an operand of a recipe; valid: {', '.join(linear)}")
        plain = {n: asdict(r) if isinstance(r, OperandRow) else r for n, r in rows.items()}
        return operand_table.parse_operands(plain if rows else operands)

    @model_validator(mode="after")
    def _quantizes(self) -> Recipe:
        if set(self.types.model_dump().values()) == {NONE}:
            raise ValueError("all types are 'none'; valid: a type for fprop, dgrad or wgrad")
        for name, chosen in self.plugin_options.items():
            check_choice("quantizer of the recipe", name, sorted(self.own_types()))
            PLUGINS[name].with_defaults(chosen)
        self.resolved()
        check_sources(self.config())
        self._check_used()
        check_packed(self.options, self.operands.get("fprop.x", operand_table.PLAIN))
        return self

    def own_types(self) -> set[str]:
        """Return the names of the custom quantizers that are types of the recipe."""
        names = {*self.types.model_dump().values(), *(rule.quant_type for rule in self.rules)}
        return (names | {row.quant_type or NONE for row in self.operands.values()}) & {*PLUGINS}

    def _check_used(self) -> None:
        """Raise ValueError for a key of a row that no format of its operand reads."""
        for name, row in self.operands.items():
            if idle := _idle(row, self._types_of(name, row)):
                raise ValueError(f"operands.{name}: {idle}")

    def _types_of(self, name: str, row: OperandRow) -> set[str]:
        """Return the formats of an operand in all layers."""
        site, _, operand = name.partition(".")
        of_site = getattr(self.types, site)
        if of_site == NONE:
            return {NONE}
        linear_site = formats.SITES[site]
        rules = {
            rule.quant_type for rule in self.rules if excludes.is_for(rule.pattern, linear_site)
        }
        types = {row.quant_type or of_site} | rules
        return {operand_table.member(kind, operand) or NONE for kind in types}

    def config(self) -> QuantConfig:
        """Return the options of a model with this recipe in all layers: without its rules."""
        types = self.types.model_dump()
        rows = {name: PluginRow(options=chosen) for name, chosen in self.plugin_options.items()}
        return QuantConfig(asked=types, operands=self.operands, plugins=rows, **self.options)

    def resolved(self) -> dict[tuple[str, str], Any]:
        """Return {(site, operand): OperandSpec of mqo.quant} for the linear sites.

        Raises:
            ValueError: an operand of a 'mixed' site has no type.
        """
        options = self.config()
        types = options.asked
        sites = (formats.SITES[name] for name in types)
        return {
            (site.name, operand): options.operand_spec(site.name, operand, "", types[site.name])
            for site in sites
            for operand in (site.lhs, site.rhs)
        }

    def ruled(self, rule: Rule) -> list[str]:
        """Return how the operands of a rule's layers are quantized, in words."""
        ruled = (operand_table.LayerRule(rule.pattern or "linear:*", rule.quant_type),)
        types = self.types.model_dump()
        config = QuantConfig(asked=types, rules=ruled, **self.options)
        return sorted({entry.choices for entry in table.entries(config) if entry.ruled})

    @property
    def label(self) -> str:
        """Return the name for tables and plots, with the switched ingredients."""
        name = f"{self.name} recipe"
        return " ".join((f"{name} {self.digest}" if self.own else name, *self.changes))

    @property
    def digest(self) -> str:
        """Return a hash that distinguishes files of the same name."""
        texts = {"name", "summary", "source", "deviations", "own", "changes", "plugins"}
        return hashlib.sha256(self.model_dump_json(exclude=texts).encode()).hexdigest()[:6]

    @property
    def ingredients(self) -> tuple[str, ...]:
        """Return the ingredients that can be switched off."""
        rows = list(self.operands.values())
        ingredients = {KEPT} if any(rule.keeps for rule in self.rules) else set()
        ingredients |= {
            name for name in INGREDIENTS if any(_without(row, name) != row for row in rows)
        }
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
            keys = tomllib.loads(path.read_text(encoding="utf-8"))
            if files := plugin_files(path, keys):
                from mqo.quant.plugin_file import load_quantizers  # imports torch

                for file in files:
                    load_quantizers(file)
            return cls.from_table(name, keys)
        except ValueError as error:
            raise ValueError(f"{path}: {first_fault(error)}") from None

    @classmethod
    def from_table(cls, name: str, keys: Mapping[str, Any]) -> Recipe:
        """Return the recipe of a file with these keys; ValueError for an invalid one.

        `name` is that of a recipe, or FILE.toml, the user's own. Its own quantizers must be types.
        """
        path = path_of(name)
        for key in ("name", "changes", "own"):
            if key in keys:
                raise ValueError(f"{key} cannot be set in a file; the name is that of the file")
        shown = {"summary": "", "source": str(path)}
        files = tuple(map(str, plugin_files(path, keys)))
        return cls(
            name=path.stem, own=name.endswith(".toml"), **shown | dict(keys) | {"plugins": files}
        )

    @classmethod
    def of_type(cls, quant_type: str) -> Recipe:
        """Return the recipe that quantizes all operands of all layers to a type."""
        types = Types(**dict.fromkeys(LINEAR_SITES, quant_type))
        source = "formats.toml"
        return cls(name=quant_type, summary="", source=source, types=types, output_layer=True)

    def without(self, ingredient: str) -> Recipe:
        """Return a copy without one of its `ingredients`; ValueError if it lacks that one."""
        check_choice(f"ingredient of {self.name}", ingredient, self.ingredients)
        operands = {name: _without(row, ingredient) for name, row in self.operands.items()}
        rules = tuple(rule for rule in self.rules if not (ingredient == KEPT and rule.keeps))
        changes = (*self.changes, f"without {ingredient}")
        return self.model_copy(update={"operands": operands, "rules": rules, "changes": changes})

    def with_output_layer(self) -> Recipe:
        """Return a copy that quantizes the LM head."""
        changes = (*self.changes, f"with {OUTPUT_LAYER}")
        return self.model_copy(update={"output_layer": True, "changes": changes})

    def all_rules(self, blocks: int) -> Iterator[dict[str, str]]:
        """Yield the rules of quant.toml for a model with this number of transformer blocks."""
        for rule in self.rules:
            yield from rule.rows(blocks)
        if not self.output_layer:
            yield {"layers": f"linear:{OUTPUT_LAYER}", "quant_type": NONE}


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
    if row.tile == "square" and not any(kind.square for kind in row_formats):
        return f"{kinds} has no square tiles"
    if row.scale_rule and not any(kind.is_mx for kind in row_formats):
        return f"{kinds} has only one scale rule; scale_rule is for MX formats"
    return ""


def _without(row: OperandRow, ingredient: str) -> OperandRow:
    """Return an operand without an ingredient; unchanged if it lacks that one."""
    left_out: dict[str, dict[str, Any]] = {
        HADAMARD: {"hadamard": None, "signs": None},
        # The gain makes room for rounding up, and has no other use.
        STOCHASTIC: {"rounding": None, "gain": 1.0} if row.rounding == STOCHASTIC else {},
        SQUARE: {"tile": None},
    }
    return replace(row, **left_out.get(ingredient, {}))


def names() -> list[str]:
    """Return the names of the recipes in this package."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def path_of(name: str) -> Path:
    """Return the file of a recipe's name, or FILE.toml itself; ValueError lists the names."""
    if name.endswith(".toml"):
        return Path(name)
    check_choice("recipe", name, names())
    return HERE / f"{name}.toml"


def plugin_files(path: Path, keys: Mapping[str, Any]) -> list[Path]:
    """Return the files of quantizers that a recipe in the file `path` names, absolute."""
    named = keys.get("plugins", [])
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"plugins = {named!r}; valid: a list of files of Python")
    return [Path(os.path.realpath(path.parent / name)) for name in named]


def first_fault(error: Exception) -> str:
    """Return the text of the error, or of pydantic's first fault."""
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {fault['msg'].removeprefix('Value error, ')}".removeprefix(": ")
