"""`mqo stats`: how well formats represent a saved tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import FormatsOption, JsonOption
from mqo.project import Project
from mqo.terminal import emit


def stats(
    file: Annotated[Path, typer.Argument(help="A safetensors file, such as in a run's dumps/.")],
    tensor: Annotated[
        list[str] | None, typer.Option(help="A tensor to measure, by name or pattern; repeatable.")
    ] = None,
    axis: Annotated[
        int | None,
        typer.Option(help="Axis of MX blocks; default: that of a dumped operand, else the last."),
    ] = None,
    formats: FormatsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how well each format, block and scale rule represents a saved tensor."""
    from mqo.launch.own_formats import format_rows
    from mqo.launch.own_types import OwnTypes
    from mqo.report.stats import measure, stats_lines

    rows = format_rows(OwnTypes.from_options(formats).rows)
    result = measure(Project.here().ours, file, tensor or (), axis, rows)
    emit("stats", result, "\n".join(stats_lines(result)), as_json)
