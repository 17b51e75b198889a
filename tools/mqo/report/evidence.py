"""What gaps over seeds are evidence of: intervals, and differences that so few could show.

A gap is paired: a run against the unquantized one of the same seed, and so of the same data in the
same order. Gaps of several variants are several chances to be misled, which Holm's method corrects.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mqo.extras import package

LEVEL = 0.95
POWER = 0.8  # with which `smallest` would have been seen
RESAMPLES = 9999
LEAST_OF_BOOTSTRAP = 3  # values; of two it has three means


@dataclass(frozen=True)
class Evidence:
    """Of the mean of paired gaps, all relative (0.01: one percent).

    low, high: its interval at LEVEL, by Student's t. bootstrap: the same by resampling (bias
    corrected, accelerated), None of fewer than LEAST_OF_BOOTSTRAP values or where they are equal.
    p: of no gap, by the two-sided t-test; adjusted: by Holm, over the variants of a comparison.
    smallest: the least mean gap that this number of seeds, with this variance, would show at LEVEL
    with POWER. All are None for a single value.
    """

    values: tuple[float, ...]
    mean: float
    low: float | None = None
    high: float | None = None
    bootstrap: tuple[float, float] | None = None
    p: float | None = None
    adjusted: float | None = None
    smallest: float | None = None

    @property
    def seen(self) -> bool | None:
        """Return whether there is a difference, all comparisons counted; None if unknown."""
        return None if self.adjusted is None else self.adjusted < 1 - LEVEL


def evidence(gaps: Sequence[Sequence[float] | None]) -> list[Evidence | None]:
    """Return what each variant's gaps show, together one comparison; None for those without any."""
    results = [_alone(tuple(values)) if values else None for values in gaps]
    adjusted = iter(holm([result.p for result in results if result and result.p is not None]))
    return [
        replace(result, adjusted=next(adjusted)) if result and result.p is not None else result
        for result in results
    ]


def holm(chances: Sequence[float]) -> list[float]:
    """Return p values corrected for their number: the least times n, the next times n - 1, ..."""
    adjusted, largest = [0.0] * len(chances), 0.0
    for rank, i in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        largest = max(largest, min(1.0, (len(chances) - rank) * chances[i]))
        adjusted[i] = largest
    return adjusted


def _alone(values: tuple[float, ...]) -> Evidence:
    mean, count = statistics.fmean(values), len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return Evidence(values, mean)
    error = statistics.stdev(values) / math.sqrt(count)
    student = package("scipy.stats").t(count - 1)
    within = float(student.ppf((1 + LEVEL) / 2))
    # Equal gaps leave nothing to doubt: 1 where they are zero, else 0.
    p = 2 * float(student.sf(abs(mean) / error)) if error else float(mean == 0)
    return Evidence(
        values,
        mean,
        low=mean - within * error,
        high=mean + within * error,
        bootstrap=_bootstrap(values),
        p=p,
        smallest=(within + float(student.ppf(POWER))) * error,
    )


def _bootstrap(values: tuple[float, ...]) -> tuple[float, float] | None:
    import numpy as np

    if len(values) < LEAST_OF_BOOTSTRAP or len(set(values)) == 1:
        return None
    interval = (
        package("scipy.stats")
        .bootstrap((values,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, rng=0)
        .confidence_interval
    )
    return (float(interval.low), float(interval.high)) if math.isfinite(interval.low) else None
