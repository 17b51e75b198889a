"""Compute the ratio of two runs' step times, with its noise."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mqo.errors import MqoError
from mqo.perf.comparability import Steps, Timed
from mqo.perf.verdicts import Quartiles
from mqo.report.collect import warm

WIDTH = 80


@dataclass(frozen=True)
class Ratio:
    """Step time of the second over the first, from `count` pairs of `unit`: repeats or steps."""

    quartiles: Quartiles
    unit: str
    count: int

    @property
    def line(self) -> str:
        """Return the ratio in one line."""
        low, high = self.quartiles.low, self.quartiles.high
        spread = "no spread" if low is None else f"quartiles {low:.3f} to {high:.3f}"
        return f"{self.quartiles.median:.3f}x, {spread}, of {self.count} paired {self.unit}"


def ratio(base: Timed, other: Timed) -> Ratio:
    """Return the ratio of repeats if both have several, else of paired steps.

    Raises MqoError without a pair.
    """
    if min(len(base.repeats), len(other.repeats)) > 1:
        pairs = [
            (median_step(a), median_step(b))
            for a, b in zip(base.repeats, other.repeats, strict=False)
        ]
        kind = "repeats"
    else:
        first, second = base.repeats[0], other.repeats[0]
        pairs = [(first[step], second[step]) for step in warm(sorted({*first} & {*second}))]
        kind = "steps"
    if not pairs:
        raise MqoError(f"{base.name} and {other.name} have no step time at the same step")
    return Ratio(quartiles([b / a for a, b in pairs]), kind, len(pairs))


def median_step(steps: Steps) -> float:
    """Return the median seconds, without the first steps; MqoError without a step."""
    seconds = [seconds for _, seconds in sorted(steps.items())]
    if not seconds:
        raise MqoError("A run has no step time", expected="step times in its metrics.jsonl")
    return statistics.median(warm(seconds) or seconds)


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles; a single value has no quartiles."""
    middle = statistics.median(values)
    if len(values) < 2:
        return Quartiles(middle, None, None)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(middle, low, high)


def ratio_lines(base: Timed, other: Timed, result: Ratio) -> list[str]:
    """Return the comparison in at most 80 columns."""
    medians = [statistics.median(map(median_step, side.repeats)) for side in (base, other)]
    rows = [
        f"{label}  {side.name[:44]:44} {1000 * median:10.1f} ms per step"
        for label, side, median in zip("AB", (base, other), medians, strict=True)
    ]
    machines = dict.fromkeys((base.machine, other.machine))
    rows += [f"   {machine[: WIDTH - 3]}" for machine in machines]
    return [*rows, f"B/A {result.line}"]
