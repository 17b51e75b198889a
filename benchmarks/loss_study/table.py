"""The tables of the loss study, from its report: `table.py runs/loss_study/report`, as markdown.

A row of the first is a mode, its gap to bf16 of the same seed; of the second two ways to train, the
second's loss less the first's, paired by seed. Losses in nats per token, +- one standard deviation
over the seeds.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# What is changed, from which variant to which.
CHANGES = {
    "mxfp8 to mxfp4, linear layers": ("linear_mxfp8", "linear_mxfp4"),
    "mxfp8 to mxfp4, linear layers and attention": ("mxfp8", "mxfp4"),
    "gradients, too, in mxfp8": ("linear_mxfp8", "linear_mxfp8, all GEMMs"),
    "gradients, too, in mxfp4": ("linear_mxfp4", "linear_mxfp4, all GEMMs"),
    "gradients, too, in hifp8": ("linear_hifp8", "linear_hifp8, all GEMMs"),
    "the LM head left out, mxfp8": ("linear_mxfp8", "linear_mxfp8, without output_layer"),
    "the LM head left out, mxfp4": ("linear_mxfp4", "linear_mxfp4, without output_layer"),
    "the LM head left out, hifp8": ("linear_hifp8", "linear_hifp8, without output_layer"),
}

Losses = Mapping[str, Mapping[str, float]]  # {variant: {seed: loss}}


def main() -> None:
    """Print both tables of each model."""
    folder = Path(sys.argv[1])
    shares = {(row["model"], row["mode"]): row for row in rows(folder / "results.csv")}
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows(folder / "runs.csv"):
        seeds = groups.setdefault(row["group"], {}).setdefault(row["variant"], {})
        seeds[row["seed"]] = float(row["loss"])
    for group, losses in groups.items():
        model = group.partition(" ")[0]
        print(f"\n### {group}\n")
        print("\n".join([*modes(losses, model, shares), "", *changes(losses)]))


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a table of the report."""
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def modes(losses: Losses, model: str, shares: Mapping[tuple[str, str], dict]) -> Iterator[str]:
    """Yield a row a variant, in the order of what is quantized."""
    yield "| mode | FLOPs quantized | seeds | validation loss | less bf16's | relative |"
    yield "|---|---|---|---|---|---|"
    for (of, variant), row in shares.items():
        if of != model:
            continue
        share, values = float(row["quantized_share"]), losses[variant].values()
        gap = differences(losses, "bf16", variant)
        mean = statistics.fmean(values)
        base = statistics.fmean(losses["bf16"][seed] for seed in losses[variant])
        relative = "" if variant == "bf16" else f"{statistics.fmean(gap) / base:+.2%}"
        shown = "" if variant == "bf16" else spread(gap)
        yield f"| {variant} | {share:.0%} | {len(gap)} | {mean:.4f} | {shown} | {relative} |"


def changes(losses: Losses) -> Iterator[str]:
    """Yield a row a change that was measured."""
    yield "| what is changed | seeds | change of the loss |"
    yield "|---|---|---|"
    for name, (before, after) in CHANGES.items():
        if found := differences(losses, before, after):
            yield f"| {name} | {len(found)} | {spread(found)} |"


def differences(losses: Losses, before: str, after: str) -> list[float]:
    """Return the differences of the seeds that both have."""
    first, second = losses.get(before, {}), losses.get(after, {})
    return [second[seed] - first[seed] for seed in first if seed in second]


def spread(values: Iterable[float]) -> str:
    """Return the mean, and the deviation of more than one, as text."""
    given = list(values)
    more = f" ± {statistics.stdev(given):.4f}" if len(given) > 1 else ""
    return f"{statistics.fmean(given):+.4f}{more}"


if __name__ == "__main__":
    main()
