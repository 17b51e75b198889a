"""`mqo runs`: list, show and remove the runs of a folder."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import JsonOption
from mqo.errors import MqoError, RunError
from mqo.project import Project
from mqo.terminal import emit

RunsOption = Annotated[
    Path | None,
    typer.Option("--runs", metavar="DIR", help="The folder of the runs; by default runs/."),
]
NAME = "A run: its folder, or its name in the list."

runs = typer.Typer(name="runs", invoke_without_command=True)


@runs.callback()
def main(context: typer.Context, runs: RunsOption = None, as_json: JsonOption = False) -> None:
    """List runs: state, steps, loss and size; show or remove some."""
    if context.invoked_subcommand is not None:
        if runs is not None or as_json:
            raise MqoError(
                f"--runs and --json before '{context.invoked_subcommand}' would have no effect",
                expected=f"these options after `mqo runs {context.invoked_subcommand}`",
            )
        return
    from mqo.report.run_list import listed_runs, size

    entries = listed_runs(_folder(runs))
    lines = [line for entry in entries for line in entry.lines()]
    count = f"{len(entries)} run{'s' * (len(entries) > 1)}"
    total = f"{count}, {size(sum(entry.size for entry in entries))}"
    emit("runs", None, "\n".join([*lines, total]), as_json, runs=[e.as_table() for e in entries])


@runs.command()
def show(
    name: Annotated[str, typer.Argument(metavar="RUN", help=NAME)],
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the configuration, the result and the files of a run."""
    from mqo.report.run_list import details, run_named

    shown = details(run_named(_folder(runs), name))
    table = asdict(shown) | {"run": shown.run.as_table()}
    emit("runs show", None, "\n".join(shown.lines()), as_json, **table)


@runs.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help=NAME)],
    runs: RunsOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove runs, after a question; none is removed if one of them is running.

    Checkpoints in a folder of their own are kept.
    """
    from mqo.launch.run_state import remove, training_now
    from mqo.output import target_of
    from mqo.report.run_list import listed, run_named, size

    folder, training = _folder(runs), training_now()
    chosen = {run.root.resolve(): run for run in (run_named(folder, name) for name in names)}
    entries = {run: listed(run.root.name, run, training) for run in chosen.values()}
    for run, entry in entries.items():
        target_of(run.root)  # refuses a link
        if entry.state == "running":
            raise RunError(
                f"{run.root} is running; nothing was removed", expected="runs that have ended"
            )
    for run, entry in entries.items():
        print(f"{run.root} ({entry.state}, {size(entry.size)})")
    if not yes and not _confirmed(len(entries)):
        print("nothing was removed")
        raise typer.Exit(1)
    for run in entries:
        remove(run)
    print(f"removed: {len(entries)}, {size(sum(entry.size for entry in entries.values()))}")


def _folder(runs: Path | None) -> Path:
    return runs or Project.here().runs


def _confirmed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise MqoError(
            "Removing runs needs a confirmation, and there is no terminal to ask on",
            expected="--yes, or a terminal",
        )
    question = f"Remove {'this run' if count == 1 else f'these {count} runs'}?"
    return typer.confirm(question, default=False)
