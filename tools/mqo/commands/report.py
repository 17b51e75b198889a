"""`mqo report`: compare runs in a folder with a page, pictures and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.output import target_of
from mqo.project import Project

_LISTED = 8  # runs that are left out


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of them; by default all.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to make or replace.")] = Path(
        "report"
    ),
    tolerance: Annotated[
        float,
        typer.Option(min=0, metavar="PERCENT", help="The gap that the verdict tolerates."),
    ] = 0.5,
    baseline: Annotated[
        str, typer.Option(metavar="NAME", help="The mode or recipe to compare with.")
    ] = "bf16",
    latex: Annotated[
        bool, typer.Option("--latex", help="Also write each comparison as a LaTeX table.")
    ] = False,
) -> None:
    """Compare runs on one page that works offline, with its pictures and tables in one folder."""
    from mqo.report.collect import collect, named_paths
    from mqo.report.compare import compare
    from mqo.report.folder import PAGE, write
    from mqo.report.lines import summary, wrapped

    target_of(out)  # before the runs are read
    folder = Project.here().runs
    records, left_out = collect(named_paths(runs, folder) if runs else [folder])
    groups, repeated = compare(records, tolerance / 100, baseline)
    left_out += repeated
    write(groups, left_out, out, latex=latex)
    for line in (line for group in groups for line in summary(group)):
        print(line)
    for other in left_out[:_LISTED]:
        print("\n".join(wrapped(f"left out: {other}", "")))
    if len(left_out) > _LISTED:
        print(f"left out, with reasons on the page: {len(left_out) - _LISTED} more")
    print(f"{out / PAGE} ({(out / PAGE).stat().st_size / 2**20:.1f} MiB)")
