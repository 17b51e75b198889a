"""`mqo rerun`: replay a run from its kept source, and compare the losses bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import JsonOption
from mqo.project import Project
from mqo.terminal import emit


def rerun(
    run: Annotated[Path | None, typer.Argument(help="A run folder; by default the newest.")] = None,
    allow_versions: Annotated[
        bool, typer.Option("--allow-versions", help="Allow other versions of packages.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code of a run that was not made here.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Replay a run from its kept source and compare the losses; exit 1 if a bit differs."""
    from mqo.display import Display
    from mqo.launch.rerun import BitEqual
    from mqo.launch.rerun import rerun as replay
    from mqo.runs import RunFolder, latest

    say = Display.on(sys.stderr if as_json else sys.stdout)
    project = Project.here()
    original = RunFolder(run.resolve()) if run else latest(project.runs)
    outcome = replay(project, original, allow_versions=allow_versions, trust=trust, report=say)
    emit("rerun", outcome, outcome.line(), as_json)
    raise typer.Exit(0 if isinstance(outcome, BitEqual) else 1)
