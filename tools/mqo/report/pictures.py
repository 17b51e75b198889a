"""Draw loss curves, gaps with their intervals, and maps of operands, for papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.errors import RunError
from mqo.output import new_file
from mqo.report.colors import DASHES, SYMBOLS, Look
from mqo.report.compare import Group
from mqo.report.curves import MOST, Curve, first, of_group, of_runs
from mqo.report.evidence import Evidence
from mqo.report.fit import add_legend, add_title, wrapped
from mqo.report.looks import by_variant
from mqo.report.operands import QUANTITIES, Map, maps, ranges
from mqo.runs import RunFolder

FORMATS = ("png", "svg", "pdf")
TICKS = 5  # of an axis, at most
LABELS = 3.0  # inches for the labels of a forest plot
ENDINGS = tuple(f".{name}" for name in FORMATS)
PANELS = {
    "loss": "training loss",
    "difference": "difference from {}",
    "valid": "validation loss",
}


def plot(runs: Sequence[RunFolder], target: Path) -> None:
    """Draw the losses of runs, finished or not, to `target` (.png, .svg or .pdf).

    Raises:
        RunError: a run has no loss, there are over MOST curves, or `target` has another ending.
    """
    check_ending(target)
    title, curves = of_runs(runs)
    if len(curves) > MOST:
        raise RunError(
            f"These runs make {len(curves)} curves, one for all seeds of a mode",
            expected=f"at most {MOST}, which can be told apart",
            help="`mqo report` makes a page that shows each by a click",
        )
    with new_file(target) as file:
        draw_curves(curves, title, [file])


def check_ending(target: Path) -> None:
    """Raise RunError unless a picture can be written to a file of this name."""
    if target.suffix.lower() not in ENDINGS:
        raise RunError(
            f"A plot cannot be written as {target.name}",
            expected=f"a name that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}",
            help="Give another name with --out",
        )


def draw(group: Group, target: Path) -> None:
    """Draw a comparison's curves, at most MOST, to `target`.png, .svg and .pdf."""
    shown, curves = first(group), of_group(group)
    title = group.title
    if len(shown) < len(curves):
        title += f" ({len(shown)} of {len(curves)} modes)"
    title += f"\n{group.subtitle}" if group.subtitle else ""
    known = [curve for curve in curves if curve.name in shown]
    draw_curves(known, title, named(target), group.reference_run)


def draw_curves(
    curves: Sequence[Curve],
    title: str,
    targets: Sequence[Path],
    reference: str = "the unquantized run of the same seed",
) -> None:
    """Draw one panel for each known loss: the mean over seeds, and their range."""
    plt = pyplot()
    kinds = [kind for kind in PANELS if any(getattr(curve, kind).steps for curve in curves)]
    height = 0.6 + 2.6 * len(kinds)
    figure, panels = plt.subplots(
        len(kinds), sharex=True, squeeze=False, figsize=(8, height), layout="constrained"
    )
    for axes, kind in zip(panels[:, 0], kinds, strict=True):
        for curve in curves:
            _draw_band(axes, curve, kind, labelled=kind == kinds[-1])
        _dress(axes, PANELS[kind].format(reference))
        if kind == "difference":
            axes.axhline(0, color="grey", linewidth=0.8)
    _draw_chance(panels[0, 0], kinds[0], curves)
    panels[-1, 0].set_xlabel("step")
    add_title(figure, title, 11)
    add_legend(figure, 8)
    save(figure, targets)


def _draw_band(axes: Any, curve: Curve, kind: str, *, labelled: bool) -> None:
    band, points = getattr(curve, kind), kind == "valid"
    style = {"color": curve.look.light, "linestyle": DASHES[curve.look.dash][0], "linewidth": 1.2}
    symbol = curve.look.symbol
    style |= {"marker": symbol.matplotlib, "markersize": 4 if points else 5}
    if not points:  # sparse markers; a plain mode has none
        style |= {"markevery": 0.08} if symbol != SYMBOLS[0] else {"marker": ""}
    if band.steps:
        axes.fill_between(band.steps, band.low, band.high, color=curve.look.light, alpha=0.18, lw=0)
    axes.plot(band.steps, band.mean, label=curve.label if labelled else None, **style)


def _draw_chance(axes: Any, kind: str, curves: Sequence[Curve]) -> None:
    """Draw the chance level if all curves have the same one."""
    chance = {curve.chance for curve in curves}
    if kind != "difference" and len(chance) == 1 and (value := chance.pop()):
        axes.axhline(value, color="grey", linestyle="--", linewidth=0.8, label="chance, ln V")


# -- gaps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """A row of a forest plot."""

    label: str
    look: Look
    evidence: Evidence


def draw_gaps(group: Group, target: Path) -> None:
    """Draw a comparison's gaps to `target`_gaps.png, .svg and .pdf; nothing without gaps."""
    looks = by_variant(group.rows)
    gaps = [Gap(row.label, looks[row.variant], row.gap) for row in group.forest if row.gap]
    if gaps:
        title = "\n".join(filter(None, (group.title, group.subtitle)))
        forest(gaps, title, named(target.with_name(f"{target.name}_gaps")), group.reference)


def forest(
    gaps: Sequence[Gap], title: str, targets: Sequence[Path], reference: str = "unquantized"
) -> None:
    """Draw each mean gap to the baseline with its 95 % interval, in percent, one per row."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 1), layout="constrained")
    labels = [wrapped(figure, gap.label, LABELS, 8) for gap in gaps]
    lines = max(label.count("\n") + 1 for label in labels)
    figure.set_figheight(0.7 + (0.18 + 0.14 * lines) * len(gaps))
    for position, gap in enumerate(gaps):
        evidence = gap.evidence
        if evidence.low is not None and evidence.high is not None:
            ends = [100 * evidence.low, 100 * evidence.high]
            axes.plot(ends, [position, position], color=gap.look.light, linewidth=2)
        marker = gap.look.symbol.matplotlib
        # The white edge keeps the marker's shape apart from the line.
        style = {"color": gap.look.light, "markersize": 9, "markeredgecolor": "white"}
        axes.plot([100 * evidence.mean], [position], marker=marker, **style)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(gaps)), labels, fontsize=8)
    axes.set_ylim(len(gaps) - 0.5, -0.5)  # the first row on top
    axis = f"gap of the final loss to {reference}, same seed, %; 95 % interval"
    figure.supxlabel(axis, size=10)
    add_title(figure, title, 10)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    save(figure, targets)


# -- operands --------------------------------------------------------------------------------------


def plot_operands(runs: Sequence[RunFolder], target: Path) -> None:
    """Draw the operand statistics of runs of one mode over training, to `target`.

    Raises:
        RunError: the runs differ in more than seeds, have no statistics, or `target` is not a
        picture.
    """
    check_ending(target)
    title, curves = of_runs(runs)
    if len(curves) > 1:
        raise RunError(
            f"These runs have {len(curves)} modes",
            expected="one mode, with one seed or several",
        )
    grids = maps(run.read_metrics() for run in runs)
    if not grids:
        raise RunError(
            f"{runs[0].root} has no statistics of operands",
            expected="a run that quantizes, with --record-every of 1 or more",
        )
    with new_file(target) as file:
        draw_maps(grids, f"{curves[0].label}, {title}", [file])


def draw_maps(grids: Sequence[Map], title: str, targets: Sequence[Path]) -> None:
    """Draw one row per operand and one column per quantity: blocks over steps, with color bars."""
    plt = pyplot()
    operands = list(dict.fromkeys(grid.operand for grid in grids))
    limits = ranges(grids)
    figure, panels = plt.subplots(
        len(operands) + 1,  # the last row has the color bars
        len(limits),
        figsize=(max(6, 3 * len(limits)), 1.0 + 1.15 * len(operands)),
        height_ratios=[1] * len(operands) + [0.1],
        layout="constrained",
        squeeze=False,
    )
    for axes in panels.flat:
        axes.set_visible(False)
    for column, quantity in enumerate(name for name in QUANTITIES if name in limits):
        name, unit = QUANTITIES[quantity]
        drawn = {operands.index(grid.operand): grid for grid in grids if grid.quantity == quantity}
        for row, grid in drawn.items():
            image = _draw_map(panels[row, column], grid, limits[quantity])
        panels[min(drawn), column].set_title(name, fontsize=10)
        bar = panels[-1, column]
        bar.set_visible(True)
        label = "share" if unit == "%" else unit
        figure.colorbar(image, cax=bar, orientation="horizontal", label=label)
        bar.locator_params(axis="x", nbins=4)
    meaning = "measured steps from left to right, transformer blocks from top to bottom"
    add_title(figure, f"{title}: {meaning}", 11)
    save(figure, targets)


def _draw_map(axes: Any, grid: Map, limits: tuple[float, float]) -> Any:
    axes.set_visible(True)
    image = axes.imshow(grid.values, aspect="auto", cmap="cividis", vmin=limits[0], vmax=limits[1])
    image.set_interpolation("nearest")
    axes.set_yticks(*_some(grid.rows), fontsize=7)
    axes.set_xticks(*_some([str(step) for step in grid.steps]), fontsize=7)
    axes.set_ylabel(grid.operand, fontsize=8)
    return image


def _some(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the positions of a few labels, and these labels."""
    positions = list(range(0, len(labels), -(-len(labels) // TICKS)))
    return positions, [labels[position] for position in positions]


# -- matplotlib ------------------------------------------------------------------------------------


def named(target: Path) -> list[Path]:
    """Return the files of a picture, one per format."""
    return [target.with_name(f"{target.name}.{ending}") for ending in FORMATS]


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, targets: Sequence[Path]) -> None:
    """Write a figure to all targets, and close it."""
    for target in targets:
        figure.savefig(target, dpi=120)
    pyplot().close(figure)


def pyplot() -> Any:
    """Return matplotlib's pyplot, set up to write only files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a $ in a name is a dollar sign
    import matplotlib.pyplot

    return matplotlib.pyplot
