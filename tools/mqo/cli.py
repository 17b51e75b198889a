"""The command line of `mqo`: `mqo NAME` is in commands/NAME.py.

Libraries are imported inside the commands: `mqo --help` and the read-only commands start fast.
Exit codes: 0 fine, 1 something differs or needs action, 2 an error, after which nothing is changed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from mqo.commands.adopt import adopt
from mqo.commands.apply import apply
from mqo.commands.convert import convert
from mqo.commands.coverage import coverage
from mqo.commands.data import data
from mqo.commands.diff import diff
from mqo.commands.doctor import doctor
from mqo.commands.eval import evaluate
from mqo.commands.export import export
from mqo.commands.formats import formats
from mqo.commands.generate import generate
from mqo.commands.matrix import matrix
from mqo.commands.perf import perf
from mqo.commands.plot import plot
from mqo.commands.plugin import plugin
from mqo.commands.recipe import recipe
from mqo.commands.report import report
from mqo.commands.rerun import rerun
from mqo.commands.restore import restore
from mqo.commands.setup import setup
from mqo.commands.simulate import ANY_WORDS, PassesOn, simulate
from mqo.commands.snapshot import snapshot
from mqo.commands.stats import stats
from mqo.commands.status import status
from mqo.commands.sweep import sweep
from mqo.commands.track import track
from mqo.commands.vendor import vendor
from mqo.commands.verify import verify
from mqo.project import Project
from mqo.terminal import guarded

app = typer.Typer(
    help="Megatron Quant Overlay: patch a vendored Megatron-LM, run it quantized, undo it exactly.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,  # click suggests the nearest ones, too
    pretty_exceptions_enable=False,
)
_command: Callable[..., None]
for _command in (vendor, apply, restore, status, diff, verify, snapshot, adopt):
    app.command()(_command)
app.command(name="eval")(evaluate)
for _command in (generate, sweep, report, perf):
    app.command()(_command)
for _command in (simulate, coverage):
    app.command(cls=PassesOn, context_settings=ANY_WORDS)(_command)
for _command in (track, setup, doctor, stats, plot, rerun, export):
    app.command()(_command)
for _group in (matrix, convert, data, recipe, formats, plugin):
    _group.suggest_commands = False
    app.add_typer(_group)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(Project.here().version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Patch a vendored Megatron-LM, run it quantized, undo it exactly."""


def main() -> None:
    """Run the `mqo` program."""
    logging.basicConfig(format="mqo: %(message)s", stream=sys.stderr)
    guarded(app)
