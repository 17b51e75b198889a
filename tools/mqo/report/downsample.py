"""Curves of few enough points to be drawn, and to be seen."""

import math
import statistics
from collections.abc import Sequence

from mqo.runs import Series

# The most points of a curve. A difference is small beside the noise of single steps.
POINTS, DIFFERENCES = 1500, 150


def steps_a_point(steps: int, points: int) -> int:
    """How many steps a point is the mean of."""
    return math.ceil(steps / points) or 1


def downsample(series: Series, points: int = POINTS) -> Series:
    """Means of as many steps as it takes, each at the last of them."""
    each = steps_a_point(len(series), points)
    parts = [series[n : n + each] for n in range(0, len(series), each)]
    return [(part[-1][0], statistics.fmean(value for _, value in part)) for part in parts]


def mean(curves: Sequence[Series]) -> Series:
    """Return the mean of several runs at the steps that all have."""
    tables = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    return [(step, statistics.fmean(table[step] for table in tables)) for step in shared]


def xy(series: Series) -> tuple[list[int], list[float]]:
    """Steps and values, as plots take them."""
    return [step for step, _ in series], [value for _, value in series]
