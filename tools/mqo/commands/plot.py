"""`mqo plot`: draw loss curves, or operand statistics, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.output import target_of
from mqo.project import Project


def plot(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs, or folders of runs: paths, or names; default: the newest."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="A .png, .svg or .pdf; default: loss.png, or operands.png."
        ),
    ] = None,
    operands: Annotated[
        bool,
        typer.Option("--operands", help="Draw SQNR, underflow, saturation by operand and depth."),
    ] = False,
) -> None:
    """Draw the loss curves of runs, or the operand statistics of one mode."""
    from mqo.report import pictures
    from mqo.report.collect import find, named_paths
    from mqo.runs import latest

    target = out or Path("operands.png" if operands else "loss.png")
    target_of(target)  # before the runs are read
    folder = Project.here().runs
    paths = named_paths(runs, folder) if runs else [latest(folder).root]
    chosen = [run for _, run in find(paths)]
    draw = pictures.plot_operands if operands else pictures.plot
    draw(chosen, target)
    print(target)
