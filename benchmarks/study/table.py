"""Prints what runs.csv shows: the gaps of each size and length, and what the next phase would need.

    .venv/bin/python benchmarks/study/table.py

A gap is an arm's validation loss less that of `none`, of the same seed: mean, 95 % interval
(Student's t), in nats and of the loss, and how many standard errors it is; p by Holm over the arms
of a table. `seeds needed` are those with which a gap as large as the arm's, with its spread, would
be seen in 80 of 100 studies at that level.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path

from mqo.report.evidence import LEVEL, POWER, Evidence, evidence
from mqo.report.extra import package

BASELINE = "none"
MOST_SEEDS = 64
Key = tuple[str, str, int]  # model, size, steps


def main() -> None:
    """Print a table for each model, size and length."""
    for key, losses in read(Path(__file__).with_name("runs.csv")).items():
        print(f"### {key[0]}, {key[1]}, {key[2]} steps\n\n{table(losses)}\n")


def read(path: Path) -> dict[Key, dict[str, dict[int, float]]]:
    """Return {(model, size, steps): {arm: {seed: validation loss}}}."""
    found: dict[Key, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = (row["model"], row["size"], int(row["steps"]))
            found[key][row["arm"]][int(row["seed"])] = float(row["validation"])
    return found


def table(losses: dict[str, dict[int, float]]) -> str:
    """Return the gaps of one size and length as Markdown."""
    baseline = losses[BASELINE]
    arms = [arm for arm in losses if arm != BASELINE]
    gaps = [paired(losses[arm], baseline) for arm in arms]
    lines = [
        "| arm | seeds | loss | gap, nats | 95 % | of loss | errors | p (Holm) | seeds needed |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| {BASELINE} | {len(baseline)} | {statistics.fmean(baseline.values()):.4f} | | | | | | |",
    ]
    mean = statistics.fmean(baseline.values())
    for arm, found in zip(arms, evidence(gaps), strict=True):
        if found is not None:
            loss = statistics.fmean(losses[arm].values())
            lines.append(f"| {arm} | {len(found.values)} | {loss:.4f} | {row(found, mean)} |")
    return "\n".join(lines)


def paired(losses: dict[int, float], baseline: dict[int, float]) -> list[float]:
    """Return the gaps of the seeds that both have."""
    return [losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())]


def row(found: Evidence, loss: float) -> str:
    """Return the cells of a gap."""
    if found.low is None or found.high is None or found.adjusted is None:
        return f"{found.mean:+.4f} | | {found.mean / loss:+.2%} | | | "
    spread = statistics.stdev(found.values)
    errors = abs(found.mean) / (spread / math.sqrt(len(found.values)))
    return (
        f"{found.mean:+.4f} | {found.low:+.4f} to {found.high:+.4f} | {found.mean / loss:+.2%} | "
        f"{errors:.1f} | {found.adjusted:.3f} | {needed(abs(found.mean), spread)}"
    )


def needed(gap: float, spread: float) -> str:
    """Return the least number of seeds that would show a gap with this spread."""
    student = package("scipy.stats").t
    for seeds in range(2, MOST_SEEDS + 1):
        quantiles = student.ppf((1 + LEVEL) / 2, seeds - 1) + student.ppf(POWER, seeds - 1)
        if gap >= quantiles * spread / math.sqrt(seeds):
            return str(seeds)
    return f"over {MOST_SEEDS}"


if __name__ == "__main__":
    main()
