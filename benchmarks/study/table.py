"""Print the results of runs.csv as Markdown: gaps, answers, order of formats, seeds needed.

    .venv/bin/python benchmarks/study/table.py > benchmarks/study/results.md

A gap is the validation loss of one arm minus that of another arm with the same seed. The tables
give its mean and 95 % interval (Student's t) in nats, its share of the loss of `none`, the gap in
standard errors, and p after Holm's correction over the rows of the table. `seeds needed` is the
number of seeds with which 80 of 100 studies would detect a gap of this size and spread.
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
LEAST_ARMS = 4  # smallest number of arms whose order is reported
Key = tuple[str, str, int]  # model, size, steps
HEAD = """| arm | less | seeds | gap, nats | 95 % | of loss | errors | p (Holm) | seeds needed |
|---|---|---|---|---|---|---|---|---|"""


@dataclass
class Losses:
    """The runs of one model, size and length: {arm: {seed: ...}}; losses in nats per token."""

    last: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    curve: dict[str, dict[int, list]] = field(default_factory=lambda: defaultdict(dict))
    sqnr: dict[str, dict[str, float]] = field(default_factory=dict)

    def paired(self, arm: str, than: str) -> list[float]:
        """Return the gaps of `arm` to `than`, one per seed that both have."""
        losses, base = self.last.get(arm, {}), self.last.get(than, {})
        return [losses[seed] - base[seed] for seed in sorted(losses.keys() & base.keys())]

    def take_incomplete(self) -> list[str]:
        """Remove the arms without a run of each seed of the unquantized runs; return them.

        Their intervals would be wide, and would change the correction of all others.
        """
        seeds = self.last[BASELINE].keys()
        arms = [arm for arm, losses in self.last.items() if losses.keys() < seeds]
        for arm in arms:
            for table in (self.last, self.curve, self.sqnr):
                table.pop(arm, None)
        return arms

    @property
    def baseline(self) -> float:
        """Return the mean loss of the unquantized runs."""
        return statistics.fmean(self.last[BASELINE].values())


def main() -> None:
    """Print the tables of each model, size and length, and the arms without runs."""
    plan = tomllib.loads((HERE / "arms.toml").read_text(encoding="utf-8"))
    print("# Results\n\n`table.py` writes this page from runs.csv. README.md discusses it.")
    for (model, size, steps), losses in read(HERE / "runs.csv").items():
        seeds = len(losses.last[BASELINE])
        print(f"\n## {model}, {size}, {steps} steps\n")
        print(f"Unquantized: {losses.baseline:.4f} nats per token, mean of {seeds} seeds.\n")
        incomplete = losses.take_incomplete()
        arms = [arm for arm in losses.last if arm != BASELINE]
        print(table(losses, [(arm, BASELINE) for arm in arms]))
        missing = not_run(plan, (model, size, steps), losses)
        if missing:
            print(f"\nNot run yet: {', '.join(missing)}.")
        if incomplete:
            print(f"\nOf these, some seeds were run: {', '.join(incomplete)}.")
        for question in plan["questions"] if len(arms) >= LEAST_ARMS else ():
            if text := answer(losses, map(tuple, question["pairs"]), missing):
                power = f" Power: {question['power']}." if "power" in question else ""
                published = f"Published: {question['published']}.{power}"
                print(f"\n### {question['ask']}\n\n{published}\n\n{text}")
        if len(losses.sqnr) >= LEAST_ARMS:
            print(f"\n### Does the gap close with the schedule?\n\n{closing(losses, arms)}")
            print(f"\n### Does the order by SQNR predict the order by loss?\n\n{order(losses)}")


def not_run(plan: Mapping[str, Any], key: Key, losses: Losses) -> list[str]:
    """Return the arms that arms.toml plans for a key and that have no run."""
    planned = [
        arm
        for phase in plan["phases"].values()
        for model, arms in phase["models"].items()
        if (model, phase["size"], phase["steps"]) == key
        for arm in arms
    ]
    return [arm for arm in planned if arm not in losses.last]


def answer(losses: Losses, pairs: Iterable[tuple[str, ...]], missing: Collection[str]) -> str:
    """Return the table of a question's pairs, then the pairs without runs; '' if there are none."""
    known, waiting = [], []
    for pair in pairs:
        if all(arm in losses.last for arm in pair):
            known.append(pair)
        elif all(arm in losses.last or arm in missing for arm in pair):
            waiting.append(" less ".join(pair))
    parts = [table(losses, known)] if known else []
    return "\n\n".join(parts + ([f"Not run yet: {', '.join(waiting)}."] if waiting else []))


def read(path: Path) -> dict[Key, Losses]:
    """Return the losses in runs.csv by model, size and steps."""
    losses_by_key: dict[Key, Losses] = defaultdict(Losses)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            losses = losses_by_key[row["model"], row["size"], int(row["steps"])]
            seed = int(row["seed"])
            losses.last[row["arm"]][seed] = float(row["validation"])
            losses.curve[row["arm"]][seed] = json.loads(row["curve"])
            if measured := json.loads(row["sqnr"] or "{}"):
                losses.sqnr[row["arm"]] = measured
    return losses_by_key


# -- gaps ------------------------------------------------------------------------------------------


def table(losses: Losses, pairs: Iterable[tuple[str, ...]]) -> str:
    """Return a table with one row per pair of arms: the gap of the first to the second."""
    pairs = [pair for pair in pairs if losses.paired(*pair)]
    rows = zip(pairs, evidence([losses.paired(*pair) for pair in pairs]), strict=True)
    lines = [
        f"| {arm} | {than} | {len(gap.values)} | {cells(gap, losses.baseline)} |"
        for (arm, than), gap in rows
        if gap is not None
    ]
    return "\n".join([HEAD, *lines])


def cells(gap: Evidence, loss: float) -> str:
    """Return the table cells of a gap; the relative gap is its share of `loss`."""
    if gap.low is None or gap.high is None or gap.adjusted is None:
        return f"{gap.mean:+.4f} | | {gap.mean / loss:+.2%} | | | "
    spread = statistics.stdev(gap.values)
    errors = abs(gap.mean) / (spread / math.sqrt(len(gap.values)))
    return (
        f"{gap.mean:+.4f} | {gap.low:+.4f} to {gap.high:+.4f} | {gap.mean / loss:+.2%} | "
        f"{errors:.1f} | {gap.adjusted:.3f} | {needed(abs(gap.mean), spread)}"
    )


def needed(gap: float, spread: float) -> str:
    """Return the smallest number of seeds that would detect a gap with this spread."""
    student = package("scipy.stats").t
    for seeds in range(2, MOST_SEEDS + 1):
        quantiles = student.ppf((1 + LEVEL) / 2, seeds - 1) + student.ppf(POWER, seeds - 1)
        if gap >= quantiles * spread / math.sqrt(seeds):
            return str(seeds)
    return f"over {MOST_SEEDS}"


# -- during training, and by SQNR ----------------------------------------------------------------


def closing(losses: Losses, arms: Iterable[str]) -> str:
    """Return a table of the gaps half-way and at the end of training, and their difference."""
    half = {arm: _change(losses, arm) for arm in arms}
    known = {arm: changes for arm, changes in half.items() if changes}
    results = evidence([[late - early for early, late in changes] for changes in known.values()])
    lines = [
        "| arm | gap half-way | at the end | change | 95 % | p (Holm) |",
        "|---|---|---|---|---|---|",
    ]
    for (arm, changes), change in zip(known.items(), results, strict=True):
        early, late = (statistics.fmean(values) for values in zip(*changes, strict=True))
        if change is not None and change.low is not None and change.high is not None:
            ends = f"{change.low:+.4f} to {change.high:+.4f} | {change.adjusted:.3f}"
            lines.append(f"| {arm} | {early:+.4f} | {late:+.4f} | {change.mean:+.4f} | {ends} |")
    return "\n".join(lines)


def _change(losses: Losses, arm: str) -> list[tuple[float, float]]:
    """Return, for each seed, the gap half-way and the gap at the last step."""
    gaps = []
    for seed in sorted(losses.curve[arm].keys() & losses.curve[BASELINE].keys()):
        loss, base = (by_step(losses.curve[name][seed]) for name in (arm, BASELINE))
        last = max(loss)
        middle = min(loss, key=lambda step: abs(step - last / 2))
        gaps.append((loss[middle] - base[middle], loss[last] - base[last]))
    return gaps


def by_step(curve: list) -> dict[int, float]:
    """Return the mean of the evaluations at each step."""
    steps: dict[int, list[float]] = defaultdict(list)
    for step, loss in curve:
        steps[step].append(loss)
    return {step: statistics.fmean(values) for step, values in steps.items()}


def order(losses: Losses) -> str:
    """Return a table of the arms, sorted by the mean SQNR of their operands, with their gaps."""
    decibels = {arm: statistics.fmean(sqnr.values()) for arm, sqnr in losses.sqnr.items()}
    gaps = {arm: losses.paired(arm, BASELINE) for arm in decibels}
    known = sorted((arm for arm in decibels if gaps[arm]), key=lambda arm: -decibels[arm])
    mean = {arm: statistics.fmean(gaps[arm]) for arm in known}
    lines = ["| arm | mean SQNR of its operands, dB | gap, nats |", "|---|---|---|"]
    lines += [f"| {arm} | {decibels[arm]:.1f} | {mean[arm]:+.4f} |" for arm in known]
    rho, low, high = spearman(decibels, {arm: gaps[arm] for arm in known})
    text = f"Spearman correlation of SQNR and gap: {rho:+.2f}"
    if low is not None:
        text += f", {low:+.2f} to {high:+.2f} (middle 95 % over resampled seeds)"
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
