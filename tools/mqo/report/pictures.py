"""A comparison's curves as a picture, for where no browser is."""

from __future__ import annotations

from pathlib import Path

from mqo.report.colours import DASHES, look
from mqo.report.compare import Group, difference
from mqo.report.symbols import SYMBOLS, symbol
from mqo.report.thin import DIFFERENCES, mean, thin, xy

FORMATS = ("png", "svg")


def draw(group: Group, target: Path) -> None:
    """Training loss, its difference to bf16, and validation loss, as `target`.png and .svg.

    A curve is the mean over the seeds of a variant.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(3, sharex=True, figsize=(8, 9), layout="constrained")
    for row in group.rows:
        one, shape = look(row.types), symbol(group, row.variant)
        style = {"color": one.light, "linestyle": DASHES[one.dash], "linewidth": 1.2}
        style |= {"marker": shape.matplotlib, "markersize": 4}
        # Along a curve points stand where another variant has its colour and dash, and apart.
        sparse = style | ({"markevery": 0.08} if shape != SYMBOLS[0] else {"marker": ""})
        pairs = [(run, group.baseline(run)) for run in row.runs]
        apart = [difference(run, base) for run, base in pairs if base and base is not run]
        panels[0].plot(*xy(thin(mean([run.train for run in row.runs]))), **sparse)
        if apart:
            panels[1].plot(*xy(thin(mean(apart), DIFFERENCES)), **sparse)
        panels[2].plot(*xy(mean([run.valid for run in row.runs])), label=row.variant, **style)
    titles = ("training loss", "training loss less that of bf16", "validation loss")
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
