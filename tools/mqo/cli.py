"""The command line of `mqo`: `mqo NAME` is in commands/NAME.py.

Libraries are imported inside the commands: `mqo --help` and the read-only commands start fast.
Exit codes: 0 fine, 1 something differs or needs action, 2 an error, after which nothing is changed.
"""

from __future__ import annotations

import logging
import shlex
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from click.exceptions import UsageError
from typer.core import TyperCommand, TyperGroup

from mqo.commands.options import TakesPlurals
from mqo.commands.simulate import ANY_WORDS, PassesOn
from mqo.commands.train import TrainingCommand
from mqo.errors import MqoError
from mqo.project import Project
from mqo.terminal import guarded


class Nearest(TyperGroup):
    """Commands that suggest one name for a mistyped command or option, the nearest."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a usage error keeps only the first of the names that it suggests."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            if near := getattr(error, "possibilities", None):
                vars(error)["possibilities"] = list(near)[:1]
            raise


app = typer.Typer(
    cls=Nearest,
    help="Megatron Quant Overlay: patch a vendored Megatron-LM, run it quantized, undo it exactly.",
    no_args_is_help=True,
    suggest_commands=False,  # click suggests one, too
    pretty_exceptions_enable=False,
)
# The help shows the panels and the commands in this order.
PANELS = {
    "Train and compare": "demo train sweep runs compare report perf rerun track",
    "Look closer": "coverage simulate plot stats eval sensitivity generate doctor",
    "Models and data": "setup data convert export recipe formats plugin matrix",
    "Megatron's source": "vendor apply restore status diff verify snapshot adopt",
}
_CLASSES: dict[str, type[TyperCommand]] = {
    "train": TrainingCommand,
    "simulate": PassesOn,
    "coverage": PassesOn,
    **dict.fromkeys(("sweep", "perf", "eval"), TakesPlurals),
}
for _panel, _names in PANELS.items():
    for _name in _names.split():
        _module = import_module(f"mqo.commands.{_name}")
        _command = getattr(_module, "evaluate" if _name == "eval" else _name)
        if isinstance(_command, typer.Typer):
            _command.suggest_commands = False
            app.add_typer(_command, rich_help_panel=_panel)
        else:
            app.command(
                _name,
                cls=_CLASSES.get(_name),
                context_settings=ANY_WORDS if _CLASSES.get(_name) is PassesOn else None,
                rich_help_panel=_panel,
            )(_command)


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
    guarded(_run)


def _run() -> None:
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    if "" in own and own[0] != "generate":  # whose prompt may be empty
        raise MqoError(
            f"An argument is empty, after {shlex.join(['mqo', *own[: own.index('')]])}",
            expected="a value; an empty path would be the current folder",
            help="Maybe a variable of your shell is not set",
        )
    app(prog_name="mqo")
