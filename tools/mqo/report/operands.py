"""Statistics of quantized operands over training: one map per quantity and operand."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mqo.matrix.tables import SITES
from mqo.runs import Series


class Quantity(NamedTuple):
    """A statistic of operands, and its unit: "%" for shares, which are 0 to 1."""

    title: str
    unit: str


# By its name in the metrics.
QUANTITIES = {
    "sqnr_db": Quantity("SQNR", "dB"),
    "bias": Quantity("bias", "%"),
    "underflow": Quantity("underflow", "%"),
    "saturation": Quantity("saturation", "%"),
    "scale_spread": Quantity("spread of scales", "octaves"),
    "noise_ratio": Quantity("gradient to noise", "times"),
}
COLUMNS = 60  # measured steps that a map shows
_NAME = re.compile(r"quant/(?P<site>[^/]+)/(?P<layer>.+)/(?P<operand>[^/]+)/(?P<quantity>[^/]+)")
_BLOCK = re.compile(r"\blayers\.(\d+)\b")
OUTSIDE = 1 << 30  # the block of a layer that is in none, such as output_layer: after all others


@dataclass(frozen=True)
class Map:
    """A quantity of an operand: `values` has one row per block, one value per step, NaN if missing.

    `operand` is SITE.OPERAND. A value is the mean over the block's layers and over the runs.
    """

    operand: str
    quantity: str
    steps: tuple[int, ...]
    blocks: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]

    @property
    def rows(self) -> list[str]:
        """Return the blocks as text for the axis."""
        return ["other" if block == OUTSIDE else str(block) for block in self.blocks]


def maps(runs: Iterable[Mapping[str, Series]]) -> list[Map]:
    """Return the maps of several runs' metrics, by site and operand; none without statistics."""
    cells: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for name, series in (item for metrics in runs for item in metrics.items()):
        match = _NAME.fullmatch(name)
        if match is None or match["quantity"] not in QUANTITIES:
            continue
        block = _BLOCK.search(match["layer"])
        key = f"{match['site']}.{match['operand']}", match["quantity"]
        for step, value in series:
            cells[key][int(block[1]) if block else OUTSIDE, step].append(value)
    order = list(QUANTITIES)
    return [
        _map(*key, cells[key])
        for key in sorted(cells, key=lambda k: (_rank(k[0]), order.index(k[1])))
    ]


def _rank(operand: str) -> tuple[int, str]:
    """Return the key that sorts operands by the order of sites in a step."""
    site = operand.partition(".")[0]
    return (SITES.index(site) if site in SITES else len(SITES), operand)


def _map(operand: str, quantity: str, cells: Mapping[tuple[int, int], Sequence[float]]) -> Map:
    steps = _thinned(sorted({step for _, step in cells}))
    blocks = tuple(sorted({block for block, _ in cells}))
    values = tuple(tuple(_mean(cells.get((block, step), ())) for step in steps) for block in blocks)
    return Map(operand, quantity, steps, blocks, values)


def _thinned(steps: Sequence[int]) -> tuple[int, ...]:
    """Return at most COLUMNS of the steps, including the first and the last."""
    if len(steps) <= COLUMNS:
        return tuple(steps)
    return tuple(steps[round(n * (len(steps) - 1) / (COLUMNS - 1))] for n in range(COLUMNS))


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def shown(quantity: str, value: float) -> str:
    """Return a value of a quantity with its unit."""
    unit = QUANTITIES[quantity].unit
    return f"{value:.2%}" if unit == "%" else f"{value:.1f} {unit}"


def ranges(grids: Iterable[Map]) -> dict[str, tuple[float, float]]:
    """Return {quantity: (minimum, maximum)}, the color range that the maps share."""
    known: dict[str, list[float]] = defaultdict(list)
    for grid in grids:
        known[grid.quantity] += [v for row in grid.values for v in row if math.isfinite(v)]
    return {quantity: (min(values), max(values)) for quantity, values in known.items() if values}
