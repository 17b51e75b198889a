"""`mqo train`: train a model, with the command line of script/train_config.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class TrainingCommand(TyperCommand):
    """A command whose words, --help among them, go to the parser of the trainings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep all words for the function."""
        ctx.obj = args
        return super().parse_args(ctx, [])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """Return the options that begin with `incomplete`."""
        from click.shell_completion import CompletionItem

        from mqo.launch.arguments import parser

        actions = parser()._actions
        options = (word for action in actions for word in action.option_strings)
        return [CompletionItem(word) for word in options if word.startswith(incomplete or "--")]


def train(context: typer.Context) -> None:
    """Train a model, quantized or not; each run gets a folder."""
    from mqo.commands.train_config import train_with

    train_with(context.obj, program="mqo train")
