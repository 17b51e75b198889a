"""The loss curves of one or more runs as one picture."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mqo.errors import RunError
from mqo.report.colours import DASHES, MARKERS, Look, look
from mqo.report.thin import xy
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder, last_of_each_step

ENDINGS = (".png", ".svg", ".pdf")


def plot(runs: Sequence[RunFolder], target: Path) -> None:
    """Draw training and validation loss (nats per token) over steps to `target` (.png, .svg, .pdf).

    Colors and dashes are the report's; runs with the same ones have markers of different shapes.
    The dashed line is chance, ln(vocabulary size), where the runs agree on one.

    Raises:
        RunError: a run has no loss, or `target` another ending.
    """
    if target.suffix.lower() not in ENDINGS:
        raise RunError(
            f"A plot cannot be written as {target.name}",
            expected=f"a name that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}",
            help="Give another name with --out",
        )
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    seen: Counter[Look] = Counter()
    for run in runs:
        metrics = run.read_metrics()
        # A student that learns from its teacher alone is only validated on its text.
        train, valid = (
            last_of_each_step(metrics.get(name, [])) for name in (TRAIN_LOSS, VALID_LOSS)
        )
        if not train and not valid:
            raise RunError(f"{run.root} recorded no loss", expected=f"rows in {run.metrics.name}")
        one = look(_types(run))
        style = {"color": one.light, "linestyle": DASHES[one.dash]}
        marker = MARKERS[seen[one] % len(MARKERS)]
        seen[one] += 1
        axes.plot(*xy(train), alpha=0.45, linewidth=1, **style)
        axes.plot(*xy(valid), marker=marker, label=_label(run), **style)
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


def _types(run: RunFolder) -> dict[str, str]:
    """{site: type} as the run was asked for."""
    return tomllib.loads(run.quant_config.read_text(encoding="utf-8")).get("asked", {})


def _label(run: RunFolder) -> str:
    config = run.read_config()
    of, asked = config["experiment"], config["quantization"]
    which = "" if asked["gemms"] == "fprop" else f", {asked['gemms']} GEMMs"
    names = (of["model"]["name"], of["dataset"]["name"], asked["mode"])
    more = "".join(f", {text}" for text in options(run))
    return f"{' '.join(names)}{which}{more} ({of['training']['name']}, {of['dtype']})"


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
