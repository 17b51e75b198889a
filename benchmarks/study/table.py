"""Print the results of runs.csv as Markdown: gaps, answers, order of formats, seeds needed.

    .venv/bin/python benchmarks/study/table.py > benchmarks/study/results.md

A gap is the validation loss of one arm minus that of another arm with the same seed. The tables
give its mean and 95 % interval (Student's t) in nats, its share of the loss of `none`, the gap in
standard errors, and p after Holm's correction over the rows of the table. `seeds needed` is the
number of seeds with which 80 of 100 studies would detect a gap of this size and spread.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqo.extras import package
from mqo.report.evidence import LEVEL, POWER, Evidence, evidence
from mqo.runs import Series
from predict import BASELINE, Prediction, predictions

HERE = Path(__file__).parent
LEAST_ARMS = 4  # smallest number of arms whose questions are answered
DRAWN = "llama32-1b"  # the model whose answers figures.py draws
SHORT = 100  # steps of the runs that measure the noise of gradients
PREDICTS = "What predicts the gap at the end?"
MOST_SEEDS = 64
Key = tuple[str, str, int]  # model, size, steps
HEAD = """| arm | less | seeds | gap, nats | 95 % | of loss | errors | p (Holm) | seeds needed |
|---|---|---|---|---|---|---|---|---|"""


@dataclass
class Losses:
    """The runs of one model, size and length: {arm: {seed: ...}}; losses in nats per token.

    `curve` has the mean of the evaluations at each step.
    """

    last: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    curve: dict[str, dict[int, Series]] = field(default_factory=lambda: defaultdict(dict))
    sqnr: dict[str, dict[str, float]] = field(default_factory=dict)
    noise_ratio: dict[str, float] = field(default_factory=dict)  # gradient to noise, last seed
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of all seeds

    def paired(self, arm: str, than: str) -> list[float]:
        """Return the gaps of `arm` to `than`, one per seed that both have."""
        losses, base = self.last.get(arm, {}), self.last.get(than, {})
        return [losses[seed] - base[seed] for seed in sorted(losses.keys() & base.keys())]

    def take_incomplete(self, planned: Mapping[str, Collection[int]]) -> list[str]:
        """Remove the arms without a run of each planned seed; return them.

        Their intervals would be wide, and would change the correction of all others.
        """
        arms = [arm for arm, losses in self.last.items() if not planned[arm] <= losses.keys()]
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
    tables = read(HERE / "runs.csv")
    for key, losses in tables.items():
        if BASELINE not in losses.last:
            continue  # only predictors
        model, size, steps = key
        seeds = len(losses.last[BASELINE])
        print(f"\n## {model}, {size}, {steps} steps\n")
        print(f"Unquantized: {losses.baseline:.4f} nats per token, mean of {seeds} seeds.\n")
        incomplete = losses.take_incomplete(planned(plan, key))
        arms = [arm for arm in losses.last if arm != BASELINE]
        print(table(losses, [(arm, BASELINE) for arm in arms]))
        missing = not_run(plan, key, losses)
        if missing:
            print(f"\nNot run yet: {', '.join(missing)}.")
        if incomplete:
            print(f"\nOf these, some seeds were run: {', '.join(incomplete)}.")
        for question in plan["questions"] if len(arms) >= LEAST_ARMS else ():
            if text := answer(losses, pairs_of(question), missing):
                if "order" in question:
                    text += f"\n\n{agreement(losses, question['order'])}"
                if model == DRAWN and any(losses.paired(*pair) for pair in pairs_of(question)):
                    text += f"\n\n![{question['ask']}](answers/{question['name']}.png)"
                power = f" Power: {question['power']}." if "power" in question else ""
                published = f"Published: {question['published']}.{power}"
                published += f" The runs took {hours(losses, question):.1f} core hours."
                print(f"\n### {question['ask']}\n\n{published}\n\n{text}")
        if len(losses.sqnr) >= LEAST_ARMS:
            print(f"\n### Does the gap close with the schedule?\n\n{closing(losses, arms)}")
            noise = noise_of(tables, key)
            if predictors := predictions(losses, noise):
                print(f"\n### {PREDICTS}\n\n{predicting(losses, predictors, noise)}")
                print("\n![rank correlation of each predictor](answers/predictors.png)")


def noise_of(tables: Mapping[Key, Losses], key: Key) -> Mapping[str, float]:
    """Return the gradient to noise of the short runs of this model and size, by arm."""
    model, size, _ = key
    short = tables.get((model, size, SHORT))
    return short.noise_ratio if short else {}


def pairs_of(question: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs of arms of a question; of a published order, neighbors, worst first."""
    pairs = question.get("pairs") or itertools.pairwise(reversed(question["order"]))
    return [(arm, than) for arm, than in pairs]


def hours(losses: Losses, question: Mapping[str, Any]) -> float:
    """Return the hours of a question's runs; questions share arms."""
    arms = {arm for pair in pairs_of(question) for arm in pair}
    return sum(losses.seconds[arm] for arm in arms) / 3600


def planned(plan: Mapping[str, Any], key: Key) -> dict[str, set[int]]:
    """Return the seeds that arms.toml plans for each arm of a key."""
    seeds: dict[str, set[int]] = defaultdict(set)
    for phase in plan["phases"].values():
        for model, arms in phase["models"].items():
            if (model, phase["size"], phase["steps"]) == key:
                for arm in arms:
                    seeds[arm] |= set(phase["seeds"])
    return seeds


def not_run(plan: Mapping[str, Any], key: Key, losses: Losses) -> list[str]:
    """Return the arms that arms.toml plans for a key and that have no run."""
    return [arm for arm in planned(plan, key) if arm not in losses.last]


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


def agreement(losses: Losses, order: Sequence[str]) -> str:
    """Return how many pairs of a published order, lowest loss first, are in this order here."""
    if missing := [arm for arm in order if arm not in losses.last]:
        return f"The order waits for: {', '.join(missing)}."
    pairs = list(itertools.combinations(order, 2))
    gaps = evidence([losses.paired(worse, better) for better, worse in pairs])
    means = [gap.mean for gap in gaps if gap is not None]
    ordered = sum(mean > 0 for mean in means)
    seen = [gap for gap in gaps if gap is not None and gap.seen]
    chance = at_least(ordered, len(order))
    return (
        f"Of the {len(pairs)} pairs of the published order, {ordered} have this order here "
        f"({chance:.1%} of random orders reach this number); of the {len(seen)} that are "
        f"significant after Holm's correction over all pairs, {sum(gap.mean > 0 for gap in seen)}."
    )


def at_least(ordered: int, count: int) -> float:
    """Return the share of the orders of `count` arms with at least `ordered` pairs in order."""
    orders = list(itertools.permutations(range(count)))
    pairs = [sum(a < b for a, b in itertools.combinations(order, 2)) for order in orders]
    return sum(total >= ordered for total in pairs) / len(orders)


def read(path: Path) -> dict[Key, Losses]:
    """Return the losses in runs.csv by model, size and steps."""
    losses_by_key: dict[Key, Losses] = defaultdict(Losses)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            losses = losses_by_key[row["model"], row["size"], int(row["steps"])]
            seed = int(row["seed"])
            losses.seconds[row["arm"]] += float(row["seconds"])
            losses.last[row["arm"]][seed] = float(row["validation"])
            losses.curve[row["arm"]][seed] = by_step(json.loads(row["curve"]))
            if measured := json.loads(row["sqnr"] or "{}"):
                losses.sqnr[row["arm"]] = measured
            if ratio := row["noise_ratio"]:
                losses.noise_ratio[row["arm"]] = float(ratio)
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
        loss, base = (dict(losses.curve[name][seed]) for name in (arm, BASELINE))
        last = max(loss)
        middle = min(loss, key=lambda step: abs(step - last / 2))
        gaps.append((loss[middle] - base[middle], loss[last] - base[last]))
    return gaps


def by_step(curve: Iterable[tuple[int, float]]) -> Series:
    """Return the mean of the evaluations at each step."""
    steps: dict[int, list[float]] = defaultdict(list)
    for step, loss in curve:
        steps[step].append(loss)
    return [(step, statistics.fmean(values)) for step, values in sorted(steps.items())]


def predicting(
    losses: Losses, predictors: Iterable[Prediction], noise_ratio: Mapping[str, float]
) -> str:
    """Return a table of the predictors, and one of the arms, sorted by SQNR."""
    lines = ["| predictor | arms | rank correlation | 95 % |", "|---|---|---|---|"]
    lines += [
        f"| {x.name} | {x.arms} | {x.rho:+.2f} | {x.low:+.2f} to {x.high:+.2f} |"
        for x in predictors
    ]
    lines += ["", "| arm | mean SQNR, dB | gradient to noise | gap, nats |", "|---|---|---|---|"]
    decibels = {arm: statistics.fmean(sqnr.values()) for arm, sqnr in losses.sqnr.items()}
    for arm in sorted(decibels, key=lambda arm: -decibels[arm]):
        ratio = f"{noise_ratio[arm]:.2f}" if arm in noise_ratio else ""
        gap = statistics.fmean(losses.paired(arm, BASELINE))
        lines.append(f"| {arm} | {decibels[arm]:.1f} | {ratio} | {gap:+.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
