"""Format how each layer of a model is quantized: equal layers together, 80 columns wide."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mqo.quant.formats import SITES
from mqo.quant.quant_config import QuantConfig
from mqo.quant.table import layer_specs
from mqo.recipes.show import WIDTH, operand_lines, operand_row


@dataclass(frozen=True)
class EqualLayers:
    """Layers that are quantized alike, and one row per operand; no row if they are unquantized."""

    layers: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]


def equal_layers(config: QuantConfig, layers: Mapping[str, Collection[str]]) -> list[EqualLayers]:
    """Return the layers by how they are quantized in the first step, unquantized ones last.

    `layers` maps a site to the names of its layers.
    """
    by_layer: dict[str, dict[str, Any]] = {}
    for (site, layer), specs in layer_specs(config, layers).items():
        by_layer.setdefault(layer, {})[site] = specs[:2]  # both operands in the first phase
    groups: dict[Any, list[str]] = {}
    for layer, sites in by_layer.items():
        changed = (
            tuple(sites.items()) if any(s.changes for two in sites.values() for s in two) else ()
        )
        groups.setdefault(changed, []).append(layer)
    ordered = sorted(groups.items(), key=lambda item: not item[0])
    return [EqualLayers(tuple(names), tuple(_rows(changed))) for changed, names in ordered]


def _rows(sites: tuple[tuple[str, Any], ...]) -> Iterator[dict[str, Any]]:
    for name, specs in sites:
        for operand, spec in zip((SITES[name].lhs, SITES[name].rhs), specs, strict=True):
            yield operand_row(name, operand, spec)


def layer_lines(groups: list[EqualLayers]) -> Iterator[str]:
    """Yield the groups: the names of the layers, and the table of their operands."""
    for group in groups:
        yield ""
        for line in compact(group.layers):
            yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        yield from operand_lines(list(group.rows)) if group.rows else ["  unquantized"]


def compact(names: Collection[str]) -> list[str]:
    """Return names with the ranges of their first numbers, and '*' for the others."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        head, first, rest = re.fullmatch(r"(.*?\.)(\d+)(\..*)|(.*)", name).group(1, 2, 3)  # type: ignore[union-attr]
        if first is None:
            numbers[name] = []
            continue
        pattern = f"{head}{{}}{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', rest)}"
        numbers.setdefault(pattern, []).append(int(first))
    return [p.format(_ranges(sorted({*n}))) if n else p for p, n in numbers.items()]


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as '0-2,5'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
