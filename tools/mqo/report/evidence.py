"""The statistics of gaps over seeds: intervals, p-values, and the smallest detectable gaps.

A gap is paired: it compares a run with the baseline's run of the same seed, and so of the same
data in the same order. Holm's method corrects the p-values for the number of variants.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from mqo.extras import package

LEVEL = 0.95
POWER = 0.8  # of detecting `smallest`
RESAMPLES = 9999
LEAST_OF_BOOTSTRAP = 3  # values; resampling two has only three means


@dataclass(frozen=True)
class Spread:
    """A value over seeds, and its mean."""

    values: tuple[float, ...]
    mean: float

    @classmethod
    def over(cls, values: Iterable[float | None]) -> Self | None:
        """Return the spread of the values that are not None; None without any."""
        known = tuple(value for value in values if value is not None)
        return cls(known, statistics.fmean(known)) if known else None

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation; None for one value, or if one is not finite."""
        finite = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) if finite else None


@dataclass(frozen=True)
class Evidence(Spread):
    """The mean of paired gaps and its statistics, all relative (0.01: one percent).

    low, high: its interval at LEVEL, by Student's t. bootstrap: the same by resampling (bias
    corrected, accelerated), None if there are fewer than LEAST_OF_BOOTSTRAP values or all are
    equal. p: the p-value of the two-sided t-test; adjusted: after Holm correction for the variants
    of a comparison. smallest: the smallest mean gap that this many seeds, with this variance, would
    detect with POWER in one t-test at LEVEL, without Holm correction. All are None for one value.
    """

    low: float | None = None
    high: float | None = None
    bootstrap: tuple[float, float] | None = None
    p: float | None = None
    adjusted: float | None = None
    smallest: float | None = None

    @property
    def seen(self) -> bool | None:
        """Return whether the gap is significant after Holm correction; None if unknown."""
        return None if self.adjusted is None else self.adjusted < 1 - LEVEL

    @property
    def correction(self) -> str:
        """Return why the gap is not seen although its interval is on one side of zero, or ''."""
        alone = self.p is not None and self.p < 1 - LEVEL
        return " after Holm correction" if alone and not self.seen else ""


def evidence(gaps: Sequence[Sequence[float] | None]) -> list[Evidence | None]:
    """Return the evidence of each variant of one comparison; None for a variant without gaps."""
    results = [_alone(tuple(values)) if values else None for values in gaps]
    adjusted = iter(holm([result.p for result in results if result and result.p is not None]))
    return [
        replace(result, adjusted=next(adjusted)) if result and result.p is not None else result
        for result in results
    ]


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values after Holm correction: the smallest times n, the next times n - 1, ..."""
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
    # Equal gaps have no variance: p is 1 if they are zero, else 0.
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
