"""Draw the ranking of a model's parts as bars."""

from __future__ import annotations

from pathlib import Path

from mqo.output import new_file
from mqo.report.fit import add_title
from mqo.report.pictures import pyplot, save
from mqo.sensitivity.measure import Sensitivity

MOST = 60  # rows that a picture shows
COLOR = "#0072B2"


def draw(result: Sensitivity, target: Path) -> None:
    """Draw the largest changes, at most MOST, to `target` (.png, .svg or .pdf)."""
    plt = pyplot()
    rows = result.changes[:MOST]
    positions = range(len(rows))
    figure, (left, right) = plt.subplots(
        1, 2, sharey=True, figsize=(9, 1.0 + 0.22 * len(rows)), layout="constrained"
    )
    left.barh(positions, [100 * row.gradient for row in rows], color=COLOR)
    left.set_xlabel("change of the gradient,\n% of its norm", fontsize=9)
    left.set_yticks(positions, [row.name for row in rows], fontsize=8)
    left.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    right.errorbar(
        [row.loss for row in rows],
        positions,
        xerr=[2 * row.loss_error for row in rows],
        fmt="o",
        markersize=4,
        color=COLOR,
    )
    right.axvline(0, color="grey", linewidth=0.8)
    right.set_xlabel("change of the loss, nats per token,\n2 standard errors", fontsize=9)
    for axes in (left, right):
        axes.set_axisbelow(True)
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    title = result.title
    if len(rows) < len(result.changes):
        title += f" ({len(rows)} of {len(result.changes)})"
    add_title(figure, title, 10)
    with new_file(target) as file:
        save(figure, [file])
