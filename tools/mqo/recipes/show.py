"""Format a recipe as a table of its resolved operands, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from mqo.matrix.tables import NONE, Model
from mqo.quant.formats import format_of
from mqo.quant.operand_table import FPROP
from mqo.quant.recipe import OUTPUT_LAYER, Recipe, Rule

WIDTH = 80


def resolved(recipe: Recipe) -> list[dict[str, Any]]:
    """Return one row per operand of the linear sites, with defaults filled in."""
    return [_row(*operand, spec) for operand, spec in recipe.resolved().items()]


def _row(site: str, operand: str, operand_spec: Any) -> dict[str, Any]:
    row = {"site": site, "operand": operand, "type": operand_spec.spec.quant_type}
    if operand_spec.source:
        row["source"] = operand_spec.source
    is_none = not operand_spec.is_quantized
    if is_none and operand_spec.hadamard is None:
        return row
    spec, turned = operand_spec.spec, operand_spec.hadamard
    row |= {"tile": spec.tile_text, "rounding": spec.rounding, "gain": operand_spec.gain}
    row["scale_rule"] = "" if is_none or not format_of(spec.quant_type).is_mx else spec.scale_rule
    return row | {"hadamard": f"{turned.points} {turned.signs}" if turned else ""}


def recipe_lines(recipe: Recipe, models: dict[str, Model]) -> Iterator[str]:
    """Yield the text lines of a recipe; unquantized blocks are listed for each of `models`."""
    yield from _wrapped(recipe.label, recipe.summary)
    yield from _wrapped("source", recipe.source)
    yield ""
    yield f"{'':14}{'type':17}{'tile':9}{'rounding':13}{'scale':7}{'hadamard':11}gain"
    rows = resolved(recipe)
    for row in rows:
        yield _line(row)
    yield ""
    if named := [f"{row['site']}.{row['operand']}" for row in rows if "source" in row]:
        yield from _wrapped(f"rounded in {FPROP} before", ", ".join(named))
    head = [] if recipe.output_layer else [OUTPUT_LAYER]
    yield from _wrapped("unquantized", ", ".join([*head, "routers"]))
    yield from _wrapped("not in the recipe", "attention; use --quantization")
    for rule in recipe.rules:
        yield from _rule(recipe, rule, models)
    for name, value in recipe.options.items():
        yield f"option: {name} = {value}"
    for text in recipe.deviations:
        yield from _wrapped("deviation", text)
    switches = [f"--without {name}" for name in recipe.ingredients]
    switches += [] if recipe.output_layer else [f"--with {OUTPUT_LAYER}"]
    yield from _wrapped("switches", ", ".join(switches) or "none")


def kept_out(recipe: Recipe, blocks: int) -> str:
    """Return a line on the layers that stay unquantized in a model with `blocks` blocks."""
    keeping = [rule for rule in recipe.rules if rule.keeps]
    kept = sorted({block for rule in keeping for block in rule.blocks(blocks)})
    named = [r.layers for r in recipe.rules if not r.is_of_ends and r.quant_type == NONE]
    parts = [] if recipe.output_layer else [OUTPUT_LAYER]
    parts += [f"blocks {', '.join(map(str, kept)) or 'none'} of {blocks}"] if keeping else []
    return f"{recipe.label}; unquantized: {'; '.join([*parts, *named]) or 'nothing'}"


def _line(row: dict[str, Any]) -> str:
    name = f"{row['site']}.{row['operand']}"
    gain = row.get("gain", 1.0)
    cells = (row["type"], *(row.get(key, "") for key in ("tile", "rounding", "scale_rule")))
    widths = (17, 9, 13, 7)
    text = "".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{name:14}{text}{row.get('hadamard', ''):11}{'' if gain == 1.0 else gain}".rstrip()


def _rule(recipe: Recipe, rule: Rule, models: dict[str, Model]) -> Iterator[str]:
    if not rule.is_of_ends:
        yield from _wrapped("rule", f"{rule.pattern} {_becomes(recipe, rule)}")
        return
    first, last = (f"{e:.1%}" if isinstance(e, float) else str(e) for e in (rule.first, rule.last))
    yield f"rule: the first {first} and the last {last} of the blocks {_becomes(recipe, rule)}"
    for name, model in models.items():
        blocks = ", ".join(map(str, rule.blocks(model.num_layers))) or "none"
        yield f"  {name}: {blocks} of {model.num_layers}"


def _becomes(recipe: Recipe, rule: Rule) -> str:
    """Return a clause on how a rule quantizes its layers, with the defaults of its type."""
    if rule.quant_type == NONE:
        return "stay unquantized"
    return f"use {', '.join(recipe.ruled(rule))}"


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name}: {text}", WIDTH, subsequent_indent="  ")
