"""Check the intervals of runs.csv with only the standard library and no code of this project.

    python3 benchmarks/study/check_intervals.py [MODEL SIZE STEPS ARM]...

Prints, for each arm, the mean gap to `none` over the seeds that both have, and its 95 % interval by
Student's t, whose quantile comes from integrating the density. The default is the first three
among the arms with the most seeds. An arm is a way to quantize; runs.csv names them.
"""

import csv
import math
import sys
from pathlib import Path

TABLE = Path(__file__).with_name("runs.csv")


def density(x: float, degrees: int) -> float:
    """Return the density of Student's t at x."""
    scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    return (
        math.exp(scale)
        / math.sqrt(degrees * math.pi)
        * (1 + x * x / degrees) ** (-(degrees + 1) / 2)
    )


def mass(bound: float, degrees: int, parts: int = 4000) -> float:
    """Return the probability between -bound and bound, by Simpson's rule."""
    step = bound / parts
    inner = sum((4 if i % 2 else 2) * density(i * step, degrees) for i in range(1, parts))
    return 2 * step / 3 * (density(0, degrees) + inner + density(bound, degrees))


def quantile(degrees: int, level: float = 0.95) -> float:
    """Return b such that -b < t < b has the probability `level`, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle, degrees) < level else (low, middle)
    return high


def interval(gaps: list[float]) -> tuple[float, float, float]:
    """Return the mean and the bounds of its 95 % interval."""
    count = len(gaps)
    mean = sum(gaps) / count
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (count - 1))
    half = quantile(count - 1) * deviation / math.sqrt(count)
    return mean, mean - half, mean + half


def main() -> None:
    """Print the intervals of the given arms."""
    losses: dict[tuple[str, ...], dict[int, float]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = (row["model"], row["size"], row["steps"], row["arm"])
            losses.setdefault(key, {})[int(row["seed"])] = float(row["validation"])
    words = sys.argv[1:]
    requested = [tuple(words[i : i + 4]) for i in range(0, len(words), 4)]
    known = sorted((key for key in losses if key[3] != "none"), key=lambda key: -len(losses[key]))
    for key in requested or known[:3]:
        none = losses[(*key[:3], "none")]
        gaps = [losses[key][seed] - none[seed] for seed in sorted(losses[key].keys() & none.keys())]
        if len(gaps) > 1:
            mean, low, high = interval(gaps)
            print(f"{' '.join(key)}: {mean:+.4f}, {low:+.4f} to {high:+.4f} ({len(gaps)} seeds)")


if __name__ == "__main__":
    main()
