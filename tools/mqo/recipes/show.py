"""Format a recipe as a table of its resolved operands, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mqo.matrix.tables import NONE, Model
from mqo.quant.layer_rules import Assigned
from mqo.quant.operand_table import FPROP
from mqo.quant.recipe import OUTPUT_LAYER, Recipe
from mqo.quant.recipe_rules import Rule

WIDTH = 80


def resolved(recipe: Recipe, name: str | None = None) -> list[dict[str, Any]]:
    """Return one row per operand of the sites, with defaults filled in.

    `name` is that of a rule's recipe, for its layers.
    """
    assigned = Assigned(recipe=name) if name else None
    sites = (recipe.recipes[name] if name else recipe).types.by_site()
    specs = recipe.resolved(assigned).items()
    return [operand_row(*operand, spec) for operand, spec in specs if operand[0] in sites]


def operand_row(site: str, operand: str, operand_spec: Any) -> dict[str, Any]:
    """Return how an operand is quantized; without keys that do not apply to it."""
    row = {"site": site, "operand": operand, "type": operand_spec.spec.quant_type}
    if operand_spec.source:
        row["source"] = operand_spec.source
    is_none = not operand_spec.is_quantized
    if is_none and operand_spec.hadamard is None:
        return row
    spec, turned = operand_spec.spec, operand_spec.hadamard
    row |= {"tile": spec.tile_text, "rounding": spec.rounding, "gain": operand_spec.gain}
    if spec.changed_options:
        row["options"] = spec.changed_options
    row["scale_rule"] = spec.rule_text
    return row | {"hadamard": f"{turned.points} {turned.signs}" if turned else ""}


def list_lines(recipes: Iterable[Recipe]) -> Iterator[str]:
    """Yield the recipes by family, each with its summary and what is published about its loss."""
    families: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        families.setdefault(recipe.family, []).append(recipe)
    for number, (family, members) in enumerate(sorted(families.items())):
        yield from ["", family] if number else [family]
        for recipe in members:
            yield f"  {recipe.name}"
            for text in filter(None, (recipe.summary, recipe.published)):
                indent = "    "
                yield from textwrap.wrap(
                    text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "
                )


def recipe_lines(recipe: Recipe, models: Mapping[str, Model]) -> Iterator[str]:
    """Yield the text lines of a recipe; unquantized blocks are listed for each of `models`."""
    yield from _wrapped(recipe.label, recipe.summary)
    yield from _wrapped("source", recipe.source)
    if recipe.published:
        yield from _wrapped("published", recipe.published)
    yield ""
    yield from operand_lines(resolved(recipe))
    yield ""
    for name in recipe.recipes:
        yield f"recipe {name}, in the layers of its rules:"
        yield from operand_lines(resolved(recipe, name))
        yield ""
    head = [] if recipe.output_layer else [OUTPUT_LAYER]
    kept = [*head, "routers"] if recipe.types.of_linear else ["linear layers"]
    yield from _wrapped("unquantized", ", ".join(kept))
    if not recipe.types.of_attention:
        yield from _wrapped("not in the recipe", "attention; use --quantization")
    for rule in recipe.rules:
        yield from _rule(recipe, rule, models)
    for name, value in recipe.options.items():
        yield f"option: {name} = {value}"
    for text in recipe.deviations:
        yield from _wrapped("deviation", text)
    switches = [f"--without {name}" for name in recipe.ingredients]
    adds_head = recipe.types.of_linear and not recipe.output_layer
    switches += [f"--with {OUTPUT_LAYER}"] if adds_head else []
    yield from _wrapped("switches", ", ".join(switches) or "none")


def operand_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of operands, of `operand_row`, and what they have beyond its columns."""
    table = [("", "type", "tile", "rounding", "scale", "hadamard", "gain"), *map(_cells, rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*table, strict=True)]
    for cells in table:
        yield "".join(f"{cell:{w}}" for cell, w in zip(cells, widths, strict=True)).rstrip()
    by_options: dict[str, list[str]] = {}
    for row in rows:
        if options := row.get("options"):
            text = ", ".join(f"{name} = {value!r}" for name, value in options.items())
            by_options.setdefault(text, []).append(_name(row))
    for text, named in by_options.items():
        yield from _wrapped(f"options of {', '.join(named)}", text)
    if sourced := [_name(row) for row in rows if "source" in row]:
        yield from _wrapped(f"rounded in {FPROP} before", ", ".join(sourced))


def kept_out(recipe: Recipe, blocks: int) -> str:
    """Return a line on the layers that stay unquantized in a model with `blocks` blocks."""
    keeping = [rule for rule in recipe.rules if rule.keeps]
    kept = sorted({block for rule in keeping for block in rule.blocks(blocks)})
    named = [_layers_of(r) for r in recipe.rules if not r.keeps and r.quant_type == NONE]
    parts = [] if recipe.output_layer else [OUTPUT_LAYER]
    parts = parts if recipe.types.of_linear else ["linear layers"]
    parts += [f"blocks {', '.join(map(str, kept)) or 'none'} of {blocks}"] if keeping else []
    return f"{recipe.label}; unquantized: {'; '.join([*parts, *named]) or 'nothing'}"


def _name(row: dict[str, Any]) -> str:
    return f"{row['site']}.{row['operand']}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    gain = row.get("gain", 1.0)
    keys = ("type", "tile", "rounding", "scale_rule", "hadamard")
    return _name(row), *(row.get(key, "") for key in keys), "" if gain == 1.0 else str(gain)


def _rule(recipe: Recipe, rule: Rule, models: Mapping[str, Model]) -> Iterator[str]:
    yield from _wrapped("rule", f"{_layers_of(rule)} {_becomes(recipe, rule)}")
    if not rule.is_of_ends:
        return
    for name, model in models.items():
        blocks = ", ".join(map(str, rule.blocks(model.num_layers))) or "none"
        yield f"  {name}: {blocks} of {model.num_layers}"


def _layers_of(rule: Rule) -> str:
    """Return the layers of a rule in words."""
    if rule.layers:
        return rule.layers
    words = [", ".join(rule.parts)] if rule.parts else []
    if rule.is_of_ends:
        ends = {"first": rule.first, "last": rule.last}
        shown = {n: f"{e:.1%}" if isinstance(e, float) else str(e) for n, e in ends.items() if e}
        listed = " and ".join(f"the {name} {end}" for name, end in shown.items())
        words.append(f"{listed} of the blocks")
    return " in ".join(words)


def _becomes(recipe: Recipe, rule: Rule) -> str:
    """Return a clause on how a rule quantizes its layers, with the defaults of its type."""
    if rule.recipe:
        return f"use the recipe {rule.recipe}"
    if rule.quant_type == NONE:
        return "stay unquantized"
    return f"use {', '.join(recipe.ruled(rule))}"


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name}: {text}", WIDTH, subsequent_indent="  ")
