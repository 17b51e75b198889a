"""Writes what runs.csv shows as Markdown: gaps, answers, the order of formats, the seeds needed.

    .venv/bin/python benchmarks/study/table.py > benchmarks/study/results.md

A gap is an arm's validation loss less that of another, of the same seed: mean, 95 % interval
(Student's t), in nats and of the loss of `none`, and how many standard errors it is; p by Holm over
the rows of a table. `seeds needed` are those with which a gap as large as this one, with its
spread, would be seen in 80 of 100 studies at that level.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqo.extras import package
from mqo.report.evidence import LEVEL, POWER, Evidence, evidence

HERE = Path(__file__).parent
BASELINE = "none"
MOST_SEEDS = 64
LEAST_ARMS = 4  # of which an order says something
Key = tuple[str, str, int]  # model, size, steps
HEAD = """| arm | less | seeds | gap, nats | 95 % | of loss | errors | p (Holm) | seeds needed |
|---|---|---|---|---|---|---|---|---|"""


@dataclass
class Losses:
    """Of one model, size and length: {arm: {seed: ...}}."""

    last: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    curve: dict[str, dict[int, list]] = field(default_factory=lambda: defaultdict(dict))
    sqnr: dict[str, dict[str, float]] = field(default_factory=dict)

    def paired(self, arm: str, than: str) -> list[float]:
        """Return the gaps of the seeds that both have."""
        one, other = self.last.get(arm, {}), self.last.get(than, {})
        return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]

    @property
    def baseline(self) -> float:
        """Return the mean loss of the unquantized runs."""
        return statistics.fmean(self.last[BASELINE].values())


def main() -> None:
    """Print the tables of each model, size and length, and which arms were not run."""
    plan = tomllib.loads((HERE / "arms.toml").read_text(encoding="utf-8"))
    print("# Results\n\nWritten by `table.py` from runs.csv; README.md reads them.")
    for (model, size, steps), losses in read(HERE / "runs.csv").items():
        seeds = len(losses.last[BASELINE])
        print(f"\n## {model}, {size}, {steps} steps\n")
        print(f"Unquantized: {losses.baseline:.4f} nats per token, mean of {seeds} seeds.\n")
        arms = [arm for arm in losses.last if arm != BASELINE]
        print(table(losses, [(arm, BASELINE) for arm in arms]))
        missing = not_run(plan, (model, size, steps), losses)
        if missing:
            print(f"\nNot run yet: {', '.join(missing)}.")
        for question in plan["questions"] if len(arms) >= LEAST_ARMS else ():
            if text := answer(losses, map(tuple, question["pairs"]), missing):
                print(f"\n### {question['ask']}\n\nPublished: {question['published']}.\n\n{text}")
        if len(losses.sqnr) >= LEAST_ARMS:
            print(f"\n### Does the gap close with the schedule?\n\n{closing(losses, arms)}")
            print(f"\n### Does the order by SQNR predict the order by loss?\n\n{order(losses)}")


def not_run(plan: Mapping[str, Any], key: Key, losses: Losses) -> list[str]:
    """Return the arms that the phases of arms.toml plan for a key and that have no run."""
    planned = [
        arm
        for phase in plan["phases"].values()
        for model, arms in phase["models"].items()
        if (model, phase["size"], phase["steps"]) == key
        for arm in arms
    ]
    return [arm for arm in planned if arm not in losses.last]


def answer(losses: Losses, pairs: Iterable[tuple[str, ...]], missing: Collection[str]) -> str:
    """Return the table of a question's pairs, then those whose runs are missing; '' without any."""
    known, waiting = [], []
    for pair in pairs:
        if all(arm in losses.last for arm in pair):
            known.append(pair)
        elif all(arm in losses.last or arm in missing for arm in pair):
            waiting.append(" less ".join(pair))
    parts = [table(losses, known)] if known else []
    return "\n\n".join(parts + ([f"Not run yet: {', '.join(waiting)}."] if waiting else []))


def read(path: Path) -> dict[Key, Losses]:
    """Return the losses of runs.csv by what is comparable."""
    found: dict[Key, Losses] = defaultdict(Losses)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            of, seed = found[row["model"], row["size"], int(row["steps"])], int(row["seed"])
            of.last[row["arm"]][seed] = float(row["validation"])
            of.curve[row["arm"]][seed] = json.loads(row["curve"])
            if measured := json.loads(row["sqnr"] or "{}"):
                of.sqnr[row["arm"]] = measured
    return found


# -- gaps ------------------------------------------------------------------------------------------


def table(losses: Losses, pairs: Iterable[tuple[str, ...]]) -> str:
    """Return a row a pair of arms: by how much the first one's loss is above the second one's."""
    pairs = [pair for pair in pairs if losses.paired(*pair)]
    rows = zip(pairs, evidence([losses.paired(*pair) for pair in pairs]), strict=True)
    lines = [
        f"| {arm} | {than} | {len(found.values)} | {cells(found, losses.baseline)} |"
        for (arm, than), found in rows
        if found is not None
    ]
    return "\n".join([HEAD, *lines])


def cells(found: Evidence, loss: float) -> str:
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


# -- through training, and beside the SQNR -------------------------------------------------------


def closing(losses: Losses, arms: Iterable[str]) -> str:
    """Return the gaps half-way and at the end, by the evaluations there, and their difference."""
    half = {arm: _change(losses, arm) for arm in arms}
    known = {arm: changes for arm, changes in half.items() if changes}
    found = evidence([[late - early for early, late in changes] for changes in known.values()])
    lines = [
        "| arm | gap half-way | at the end | change | 95 % | p (Holm) |",
        "|---|---|---|---|---|---|",
    ]
    for (arm, changes), one in zip(known.items(), found, strict=True):
        early, late = (statistics.fmean(values) for values in zip(*changes, strict=True))
        if one is not None and one.low is not None and one.high is not None:
            ends = f"{one.low:+.4f} to {one.high:+.4f} | {one.adjusted:.3f}"
            lines.append(f"| {arm} | {early:+.4f} | {late:+.4f} | {one.mean:+.4f} | {ends} |")
    return "\n".join(lines)


def _change(losses: Losses, arm: str) -> list[tuple[float, float]]:
    """Return the gap half-way and that of the last step, of each seed."""
    found = []
    for seed in sorted(losses.curve[arm].keys() & losses.curve[BASELINE].keys()):
        one, base = (by_step(losses.curve[name][seed]) for name in (arm, BASELINE))
        last = max(one)
        middle = min(one, key=lambda step: abs(step - last / 2))
        found.append((one[middle] - base[middle], one[last] - base[last]))
    return found


def by_step(curve: list) -> dict[int, float]:
    """Return the mean of a step's evaluations."""
    steps: dict[int, list[float]] = defaultdict(list)
    for step, loss in curve:
        steps[step].append(loss)
    return {step: statistics.fmean(values) for step, values in steps.items()}


def order(losses: Losses) -> str:
    """Return the arms by the mean SQNR of their operands, beside their gaps."""
    decibels = {arm: statistics.fmean(of.values()) for arm, of in losses.sqnr.items()}
    gaps = {arm: losses.paired(arm, BASELINE) for arm in decibels}
    known = sorted((arm for arm in decibels if gaps[arm]), key=lambda arm: -decibels[arm])
    mean = {arm: statistics.fmean(gaps[arm]) for arm in known}
    lines = ["| arm | mean SQNR of its operands, dB | gap, nats |", "|---|---|---|"]
    lines += [f"| {arm} | {decibels[arm]:.1f} | {mean[arm]:+.4f} |" for arm in known]
    rho, low, high = spearman(decibels, {arm: gaps[arm] for arm in known})
    text = f"Spearman's correlation of SQNR and gap: {rho:+.2f}"
    if low is not None:
        text += f", {low:+.2f} to {high:+.2f} (the middle 95 % where seeds are drawn anew)"
    return "\n".join([*lines, "", text + "."])


def spearman(
    decibels: Mapping[str, float], gaps: Mapping[str, list[float]]
) -> tuple[float, float | None, float | None]:
    """Return the rank correlation of SQNR and mean gap, and its range over resampled seeds."""
    import numpy as np

    rank = package("scipy.stats").spearmanr
    x = [decibels[arm] for arm in gaps]
    count = min(map(len, gaps.values()))
    table = np.array([values[:count] for values in gaps.values()])
    rho = float(rank(x, table.mean(axis=1)).statistic)
    if count < 3:
        return rho, None, None
    random = np.random.default_rng(0)
    draws = (random.integers(0, count, count) for _ in range(999))
    resampled = [rank(x, table[:, drawn].mean(axis=1)).statistic for drawn in draws]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return rho, float(low), float(high)


if __name__ == "__main__":
    main()
