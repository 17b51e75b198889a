"""`mqo compare`: is one run, or one way to train, better than another?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import JsonOption
from mqo.project import Project
from mqo.terminal import emit


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Runs, or folders of runs, such as a sweep: paths, or names of `mqo runs`.",
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The mode or run to compare with; default: the first, in a folder the "
            "unquantized one.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the loss gaps of runs to a baseline, how sure they are, and what differs.

    Runs that differ only in the seed count as one; gaps are paired by seed.
    """
    from mqo.perf.losses import compare_losses, comparison_lines, comparison_table
    from mqo.report.collect import named_paths

    result = compare_losses(named_paths(runs, Project.here().runs), baseline)
    lines = [] if as_json else comparison_lines(result)
    emit("compare", None, "\n".join(lines), as_json, **comparison_table(result))
