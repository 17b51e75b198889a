"""Series of values over steps: thinned for plots, and combined over runs to a band."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mqo.runs import Series

# The maximum points of a curve. A difference is small compared with the noise of single steps.
POINTS, DIFFERENCES = 1500, 150


@dataclass(frozen=True)
class Band:
    """The mean, minimum and maximum over several runs at each step.

    They are NaN if a run's value is not finite.
    """

    steps: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


def band(runs: Sequence[Series], points: int = POINTS) -> Band:
    """Return the band of several runs at the steps that all have, each run averaged to `points`."""
    tables = [dict(series) for series in runs]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    thin = [downsample([(step, table[step]) for step in shared], points) for table in tables]
    rows = [tuple(value for _, value in at) for at in zip(*thin, strict=True)]
    rows = [row if all(map(math.isfinite, row)) else (math.nan,) for row in rows]
    return Band(
        steps=tuple(step for step, _ in thin[0]) if thin else (),
        mean=tuple(map(statistics.fmean, rows)),
        low=tuple(map(min, rows)),
        high=tuple(map(max, rows)),
    )


def less(series: Series, base: Series) -> Series:
    """Return a series minus another one, at the steps that both have."""
    other = dict(base)
    return [(step, value - other[step]) for step, value in series if step in other]


def steps_a_point(steps: int, points: int) -> int:
    """Return the number of steps that a point averages."""
    return math.ceil(steps / points) or 1


def downsample(series: Series, points: int = POINTS) -> Series:
    """Return at most `points` means of consecutive steps, each at its last step."""
    each = steps_a_point(len(series), points)
    parts = [series[n : n + each] for n in range(0, len(series), each)]
    return [(part[-1][0], statistics.fmean(value for _, value in part)) for part in parts]
