"""A comparison's curves as a picture, for where no browser is."""

from __future__ import annotations

from pathlib import Path

from mqo.report.colours import look
from mqo.report.compare import Group, difference
from mqo.report.thin import DIFFERENCES, thin, xy

_DASHES = {
    "solid": "-",
    "dot": ":",
    "dash": "--",
    "dashdot": "-.",
    "longdashdot": (0, (8, 2, 1, 2)),
}
FORMATS = ("png", "svg")


def draw(group: Group, target: Path) -> None:
    """Training loss, its difference to bf16, and validation loss, as `target`.png and .svg."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(3, sharex=True, figsize=(8, 9), layout="constrained")
    for row in group.rows:
        one = look(row.types)
        style = {"color": one.light, "linestyle": _DASHES[one.dash], "linewidth": 1.2}
        for n, run in enumerate(row.runs):
            base = group.baseline(run)
            panels[0].plot(*xy(thin(run.train)), label=None if n else row.variant, **style)
            if base and base is not run:
                panels[1].plot(*xy(thin(difference(run, base), DIFFERENCES)), **style)
            panels[2].plot(*xy(thin(run.valid)), marker="o", markersize=4, **style)
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
