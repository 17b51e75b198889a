"""The loss curves of one or more runs as one picture."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from mqo.errors import RunError
from mqo.report.thin import xy
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder


def plot(runs: Sequence[RunFolder], target: Path) -> None:
    """Draw training and validation loss (nats per token) over steps to `target` (.png, .svg, .pdf).

    The dashed line is chance, ln(vocabulary size), where the runs agree on one. RunError for a run
    without a loss.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, run in enumerate(runs):
        metrics = run.read_metrics()
        # A student that learns from its teacher alone is only validated on its text.
        train, valid = (metrics.get(name, []) for name in (TRAIN_LOSS, VALID_LOSS))
        if not train and not valid:
            raise RunError(f"{run.root} recorded no loss", expected=f"rows in {run.metrics.name}")
        axes.plot(*xy(train), color=f"C{i}", alpha=0.45, linewidth=1)
        axes.plot(*xy(valid), color=f"C{i}", marker="o", label=_label(run))
    chance = {_chance(run) for run in runs}
    if len(chance) == 1 and None not in chance:
        axes.axhline(chance.pop(), color="grey", linestyle="--", linewidth=1, label="chance, ln V")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title("validation loss (dots) and training loss (thin)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def _label(run: RunFolder) -> str:
    cell = json.loads(run.cell.read_text(encoding="utf-8"))
    config, dtype = cell["training"]["name"], cell["dtype"]
    which = "" if cell["gemms"] == "fprop" else f", {cell['gemms']} GEMMs"
    names = (cell["model"]["name"], cell["dataset"]["name"], cell["mode"])
    more = "".join(f", {text}" for text in options(run))
    return f"{' '.join(names)}{which}{more} ({config}, {dtype})"


def options(run: RunFolder) -> Iterator[str]:
    """What tells two runs of one cell apart: quantisers' options, schedules, layers left out."""
    tables = tomllib.loads(run.quant_config.read_text(encoding="utf-8"))
    for table in ("quantiser", "schedule"):
        yield from (f"{name} {value}" for name, value in tables.get(table, {}).items())
    yield from (f"without {glob}" for glob in tables.get("layers", {}).get("exclude", ()))


def _chance(run: RunFolder) -> float | None:
    if not run.result.exists():
        return None
    vocabulary = json.loads(run.result.read_text(encoding="utf-8"))["vocab_size"]
    return math.log(vocabulary) if vocabulary else None
