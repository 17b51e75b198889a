"""Write a recipe that keeps the most sensitive parts of a model unquantized."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mqo.errors import MqoError
from mqo.launch.options import toml_key, toml_value
from mqo.launch.plugins import RunPlugin
from mqo.matrix.tables import NONE
from mqo.output import new_file
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_operands import OperandTable
from mqo.quant.recipe_rules import Rule
from mqo.quant.subsets import PATTERNS, Change
from mqo.sensitivity.measure import Sensitivity


def share_of(text: str) -> float:
    """Return N% as a share; MqoError unless it is above 0 % and below 100 %."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip(), re.ASCII)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share < 1:
        raise MqoError(
            f"--rules {text} is not a share", expected="a percentage between 0 and 100, as in 20%"
        )
    return share


def check_kind(by: str) -> None:
    """Raise MqoError for subsets that are not whole layers, which no rule can keep."""
    if by not in PATTERNS:
        raise MqoError(
            f"--rules keeps whole layers, and --by {by} measures parts of their products",
            expected=f"--by {', '.join(PATTERNS)}",
        )


def kept(result: Sensitivity, share: float) -> list[Change]:
    """Return the most sensitive subsets that together have at most this share of the weights.

    In the order of the ranking, each one is kept that still fits.

    Raises:
        MqoError: none fits.
    """
    left, chosen = share * result.everything.weights, []
    for change in result.changes:
        if change.weights <= left:
            left -= change.weights
            chosen.append(change)
    if not chosen:
        least = min(change.weights for change in result.changes) / result.everything.weights
        raise MqoError(
            f"--rules {share:.4%} keeps nothing: the smallest {result.by} has {least:.1%} of the "
            "quantized weights",
            expected="a larger share, or smaller parts with --by layer",
        )
    return chosen


def keeping(recipe: Recipe, changes: Sequence[Change]) -> Recipe:
    """Return a recipe whose first rules leave the layers of these changes unquantized."""
    rules = tuple(Rule(layers=change.name, quant_type=NONE) for change in changes)
    return recipe.model_copy(update={"rules": (*rules, *recipe.rules)})


def write(recipe: Recipe, plugins: Sequence[RunPlugin], summary: str, target: Path) -> None:
    """Write a recipe as a file for `mqo train --recipe`; OutputError if `target` is a link."""
    with new_file(target) as file:
        file.write_text("\n".join(recipe_lines(recipe, plugins, summary)) + "\n", encoding="utf-8")


def recipe_lines(recipe: Recipe, plugins: Sequence[RunPlugin], summary: str) -> Iterator[str]:
    """Yield the lines of a recipe's file, with the files of its custom quantizers."""
    yield f"summary = {json.dumps(summary)}"
    yield from _table_lines(recipe)
    keys: dict[str, Any] = {
        "output_layer": recipe.output_layer or None,
        "options": recipe.options,
        "plugins": sorted({str(plugin.source) for plugin in plugins}),
        "plugin_options": {plugin.name: plugin.options for plugin in plugins if plugin.options},
    }
    yield from (f"{key} = {toml_value(value)}" for key, value in keys.items() if value)
    yield from _operand_lines(recipe, "operands")
    for rule in recipe.rules:
        yield "\n[[rules]]"
        for key, value in sorted(rule.model_dump(exclude_defaults=True).items()):
            yield f"{key} = {toml_value(value)}"
    for name, table in recipe.recipes.items():
        path = f"recipes.{toml_key(name)}"
        yield f"\n[{path}]"
        yield from _table_lines(table)
        yield from _operand_lines(table, f"{path}.operands")


def _table_lines(table: OperandTable) -> Iterator[str]:
    types = {site: kind for site, kind in table.types.model_dump().items() if kind != NONE}
    yield f"types = {toml_value(types)}"


def _operand_lines(table: OperandTable, path: str) -> Iterator[str]:
    if table.operands:
        yield f"\n[{path}]"
        for name, row in table.operands.items():
            yield f"{toml_key(name)} = {toml_value(row.chosen)}"
