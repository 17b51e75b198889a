"""Loss curves as pictures: of some runs in one, and of a comparison in three panels."""

import json
import math
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mqo.errors import RunError
from mqo.launch.config import Quantization
from mqo.matrix.tables import mode_label
from mqo.report.collect import changed_quantization
from mqo.report.colors import DASHES, SYMBOLS, Look, look, symbol
from mqo.report.compare import Group, difference
from mqo.report.downsample import DIFFERENCES, downsample, mean, xy
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder, last_of_each_step

ENDINGS = (".png", ".svg", ".pdf")
FORMATS = ("png", "svg", "pdf")  # of a comparison


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
    plt = _pyplot()
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
        marker = SYMBOLS[seen[one] % len(SYMBOLS)].matplotlib
        seen[one] += 1
        axes.plot(*xy(train), alpha=0.45, linewidth=1, **style)
        axes.plot(*xy(valid), marker=marker, label=_label(run), **style)
    chance = {_chance(run) for run in runs}
    if len(chance) == 1 and None not in chance:
        axes.axhline(chance.pop(), color="grey", linestyle="--", linewidth=1, label="chance, ln V")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title("validation loss (dots) and training loss (lines)", fontsize=10)
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
    try:
        of, how = config["experiment"], Quantization.model_validate(config["quantization"])
    except ValueError as error:
        raise RunError(
            f"{run.config} does not say how its run quantized: {error}",
            expected="the configuration as this version of mqo, or an earlier one, writes it",
        ) from None
    mode = mode_label(how.name, of["dtype"], scheduled=bool(how.schedule))
    mode += changed_quantization(run, how)
    names = (of["model"]["name"], of["dataset"]["name"], mode)
    return f"{' '.join(names)}, {of['training']['name']}, {of['dtype']}"


def _chance(run: RunFolder) -> float | None:
    if not run.result.exists():
        return None
    vocabulary = json.loads(run.result.read_text(encoding="utf-8"))["vocab_size"]
    return math.log(vocabulary) if vocabulary else None


def draw(group: Group, target: Path) -> None:
    """Draw training loss, its difference to the baseline, and validation loss.

    Writes `target`.png, .svg and .pdf. A curve is the mean over the seeds of a variant.
    """
    plt = _pyplot()
    figure, panels = plt.subplots(3, sharex=True, figsize=(8, 9), layout="constrained")
    for row in group.rows:
        one, shape = look(row.types), symbol(group, row.variant)
        style = {"color": one.light, "linestyle": DASHES[one.dash], "linewidth": 1.2}
        style |= {"marker": shape.matplotlib, "markersize": 4}
        # Along a curve points stand where another variant has its color and dash, and apart.
        sparse = style | ({"markevery": 0.08} if shape != SYMBOLS[0] else {"marker": ""})
        pairs = [(run, group.baseline(run)) for run in row.runs]
        apart = [difference(run, base) for run, base in pairs if base and base is not run]
        panels[0].plot(*xy(downsample(mean([run.train for run in row.runs]))), **sparse)
        if apart:
            panels[1].plot(*xy(downsample(mean(apart), DIFFERENCES)), **sparse)
        panels[2].plot(*xy(mean([run.valid for run in row.runs])), label=row.label, **style)
    titles = ("training loss", "training loss less that of the unquantized run", "validation loss")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel("nats per token")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].axhline(0, color="grey", linewidth=0.8)
    panels[2].set_xlabel("step")
    figure.suptitle(group.title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    for ending in FORMATS:
        figure.savefig(target.with_name(f"{target.name}.{ending}"), dpi=120)
    plt.close(figure)


def draw_gaps(group: Group, target: Path) -> None:
    """Draw each variant's mean gap to the baseline with its 95 % interval, a row each.

    Writes `target`_gaps.png, .svg and .pdf; nothing where no variant has a gap.
    """
    rows = group.forest
    if not rows:
        return
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.32 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        found, color = row.evidence["gap"], look(row.types).light
        if found.low is not None and found.high is not None:
            axes.plot([100 * found.low, 100 * found.high], [place, place], color=color, linewidth=2)
        axes.plot([100 * found.mean], [place], marker="o", color=color)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("final loss, % from the unquantized run of the same seed; 95 % interval")
    axes.set_title(group.title, fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for ending in FORMATS:
        figure.savefig(target.with_name(f"{target.name}_gaps.{ending}"), dpi=120)
    plt.close(figure)


def _pyplot() -> Any:
    """Return matplotlib's interface, for files alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
