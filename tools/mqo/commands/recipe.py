"""`mqo recipe`: list the recipes, and show what each does to every operand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqo.commands.options import (
    FormatsOption,
    JsonOption,
    TreeOption,
    WithOption,
    WithoutOption,
    settled,
)
from mqo.terminal import emit
from mqo.untrusted import read_text

if TYPE_CHECKING:
    from mqo.quant.recipe import Recipe
    from mqo.recipes.layers import EqualLayers

recipe = typer.Typer(
    name="recipe", help="Show how recipes quantize linear layers.", no_args_is_help=True
)


@recipe.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the recipes by family, with what is published about their loss."""
    from mqo.quant.recipe_files import names
    from mqo.recipes.recipe import read
    from mqo.recipes.show import list_lines

    recipes = [read(name) for name in names()]
    fields = {"name", "family", "summary", "published", "source"}
    rows = [entry.model_dump(include=fields) for entry in recipes]
    emit("recipes", None, "\n".join(list_lines(recipes)), as_json, recipes=rows)


@recipe.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe, or FILE.toml.")],
    without: WithoutOption = None,
    with_: WithOption = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print the file, as a start for your own recipe.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Show what each layer of this model uses.")
    ] = None,
    formats: FormatsOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Show what a recipe does to each operand, and what it leaves out."""
    from mqo.errors import MqoError
    from mqo.launch.own_types import OwnTypes
    from mqo.matrix.tables import models
    from mqo.quant.recipe_files import path_of
    from mqo.recipes.layers import layer_lines
    from mqo.recipes.recipe import changed, read
    from mqo.recipes.show import recipe_lines, resolved

    own = OwnTypes.from_options(formats)  # before types are checked
    shown_recipe = changed(read(name), without or (), with_ or ())
    own.refuse_unused_in(shown_recipe.all_types())
    if toml and (shown_recipe.changes or model):
        raise MqoError(
            "--toml prints the recipe's file, which has no changes and is for any model",
            expected="--toml without --without, --with and --model",
        )
    if toml:
        print(read_text(path_of(name)), end="")
        return
    facts = shown_recipe.model_dump(mode="json") | {"operands": resolved(shown_recipe)}
    lines = list(recipe_lines(shown_recipe, models()))
    if model is not None:
        groups = _layers(shown_recipe, model, tree)
        lines = [f"{model}, {shown_recipe.label}:", *layer_lines(groups)]
        facts["layers"] = [asdict(group) for group in groups]
    emit("recipe", None, "\n".join(lines), as_json, **facts)


def _layers(shown_recipe: Recipe, model: str, tree: Path | None) -> list[EqualLayers]:
    """Return the layers of a model by how the recipe quantizes them."""
    from mqo.launch import coverage
    from mqo.launch.config import resolve
    from mqo.launch.effects import resolved_config
    from mqo.matrix import tables
    from mqo.overlay.series import Series
    from mqo.project import Project
    from mqo.recipes.layers import equal_layers

    project, dataset = Project.here(), next(iter(tables.datasets()))  # layers are the same for all
    config = resolve(model, dataset, tables.UNQUANTIZED, "standard", recipe=shown_recipe)
    result = coverage.of_config(project, settled(tree), Series.of_project(project), config)
    return equal_layers(
        resolved_config(config, config.quantization.types or {}), result.layers_by_site()
    )
