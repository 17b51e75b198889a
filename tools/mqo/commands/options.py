"""Options that several commands share, the tree that --tree names, and the patch series."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from mqo.errors import MqoError
from mqo.project import Project

if TYPE_CHECKING:
    from mqo.overlay.series import Series
    from mqo.overlay.tree import Tree

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
TrainingOption = Annotated[str, typer.Option(help="Sets sizes and schedule.")]
OWN_MODEL = "or your own: FILE or FOLDER with a config.json, or FILE.toml"
ShrinkOption = Annotated[
    str | None,
    typer.Option(metavar="W,D", help="Divide the model's width and depth by these numbers."),
]
ModelClassOption = Annotated[
    str | None,
    typer.Option(metavar="gpt|hybrid", help="Upstream's class of the model; by default gpt."),
]
FlagsArgument = Annotated[list[str] | None, typer.Argument(help="Megatron's flags, after `--`.")]
GemmsOption = Annotated[str, typer.Option(help="fprop, or all: also dgrad and wgrad.")]
AttentionGemmsOption = Annotated[
    str, typer.Option(help="forward, or all: also the products of attention's backward pass.")
]
# Ways to quantize, as mqo.launch.variants reads them.
RecipesOption = Annotated[
    list[str] | None,
    typer.Option("--recipe", metavar="NAME,...", help="Recipes or recipe files; repeatable."),
]
AxisOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION=VALUE,...", help="Run each mode with each value of this option; repeatable."
    ),
]
TreeOption = Annotated[
    Path | None, typer.Option("--tree", help="The Megatron tree; by default Megatron-LM/.")
]
EntriesArgument = Annotated[
    list[str] | None, typer.Argument(help="Entries of the series; by default all.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Overwrite hand edits; a copy is kept in .mqo/kept.")
]
FormatsOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="TOML file whose formats become types of modes; repeatable."),
]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Python file whose quantizers become types of modes, or a name in `mqo plugin list`; "
        "repeatable.",
    ),
]
PluginOptionOption = Annotated[
    list[str] | None,
    typer.Option(metavar="T.NAME=VALUE", help="Option of such a quantizer T; repeatable."),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option(metavar="[SITE:]GLOB", help="Layers to leave unquantized; repeatable."),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(metavar="[SITE:]GLOB", help="The only layers to quantize; repeatable."),
]
TextOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Your own text, as in train_config.py; repeatable."),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Refuse a text with records that cannot be used.")
]
CHECKPOINTS = "A run, a checkpoint folder, or the folder of one iteration."
TokenizerOption = Annotated[
    Path | None, typer.Option(help="A tokenizer folder; by default the training's.")
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-argument",
        metavar="NAME",
        help="Ignore this argument, which the checkpoint has and Megatron lacks; repeatable.",
    ),
]
WithoutOption = Annotated[
    list[str] | None, typer.Option(help="An ingredient of the recipe to leave out; repeatable.")
]
WithOption = Annotated[
    list[str] | None, typer.Option("--with", help="Also quantize this layer: output_layer.")
]


# Older spellings of options that take several values; the help leaves them out.
_PLURALS = {f"--{name}s": f"--{name}" for name in ("model", "dataset", "mode", "recipe", "seed")}


class TakesPlurals(TyperCommand):
    """A command that also takes the older spellings of its options, such as --models."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words with the older spellings replaced."""
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*map(self._current, args[:end]), *args[end:]])

    def _current(self, word: str) -> str:
        name, equals, value = word.partition("=")
        option = _PLURALS.get(name, name)
        known = any(option in parameter.opts for parameter in self.params)
        return f"{option}{equals}{value}" if known else word


def joined(values: Sequence[str] | None) -> str | None:
    """Return the values of a repeatable option with commas between them; None without any.

    An empty one is refused: a shell's unset variable would stand for all names.
    """
    if values and not all(value.strip() for value in values):
        raise MqoError(
            f"One of the values {values} is empty",
            expected="names with commas between them",
        )
    return ",".join(values) if values else None


def root_of(path: Path | None) -> Path:
    """Return the folder of the tree that --tree names."""
    return (path or Project.here().tree).resolve()


def settled(path: Path | None) -> Tree:
    """Return the tree that --tree names, after cleaning up what a killed command left there."""
    from mqo.overlay.tree import Tree

    tree = Tree(root_of(path))
    tree.settle()
    return tree


def patch_series() -> Series:
    """Return the project's patch series."""
    from mqo.overlay.series import Series

    return Series.of_project(Project.here())
