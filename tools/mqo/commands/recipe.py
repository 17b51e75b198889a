"""`mqo recipe`: list the recipes, and show what each does to every operand."""

from __future__ import annotations

from typing import Annotated

import typer

from mqo.commands.options import JsonOption, WithOption, WithoutOption
from mqo.terminal import emit
from mqo.untrusted import read_text

recipe = typer.Typer(
    name="recipe", help="Show how recipes quantize linear layers.", no_args_is_help=True
)


@recipe.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the recipes."""
    from mqo.quant.recipe import names
    from mqo.recipes.recipe import read

    recipes = [read(name) for name in names()]
    text = "\n".join(f"{entry.name:16}{entry.summary}" for entry in recipes)
    rows = [entry.model_dump(include={"name", "summary", "source"}) for entry in recipes]
    emit("recipes", None, text, as_json, recipes=rows)


@recipe.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe, or FILE.toml.")],
    without: WithoutOption = None,
    with_: WithOption = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print the file, as a start for your own recipe.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a recipe does to each operand, and what it leaves out."""
    from mqo.errors import MqoError
    from mqo.matrix.tables import models
    from mqo.quant.recipe import path_of
    from mqo.recipes.recipe import changed, read
    from mqo.recipes.show import recipe_lines, resolved

    shown_recipe = changed(read(name), without or (), with_ or ())
    if toml and shown_recipe.changes:
        raise MqoError(
            "--toml prints the recipe's file, which has no changes",
            expected="--toml without --without and --with",
        )
    if toml:
        print(read_text(path_of(name)), end="")
        return
    facts = shown_recipe.model_dump(mode="json") | {"operands": resolved(shown_recipe)}
    emit("recipe", None, "\n".join(recipe_lines(shown_recipe, models())), as_json, **facts)
