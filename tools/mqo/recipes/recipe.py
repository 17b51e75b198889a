"""Read recipes and change them, as the options of commands say, with typed errors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mqo.errors import MqoError
from mqo.matrix.tables import check_choice
from mqo.quant.recipe import OUTPUT_LAYER, Recipe
from mqo.quant.recipe_files import first_fault, names, path_of, with_recipes
from mqo.quant.recipe_operands import INGREDIENTS
from mqo.recipes.quantizers import declare_file
from mqo.untrusted import NoFileError, read_toml


def read(name: str) -> Recipe:
    """Return the recipe of that name, or of FILE.toml; MqoError if there is none.

    Its own quantizers become types, without running their files.
    """
    if not name.endswith(".toml"):
        check_choice("recipe", name, names())
    path = path_of(name)
    try:
        keys = with_recipes(path, read_toml(path), read_toml)
        for file in keys["plugins"]:
            declare_file(Path(file))
        return Recipe.from_table(name, keys)
    except NoFileError as error:
        names_it = f"; {path} names it" if path.is_file() else ""
        raise MqoError(
            f"{error.found}{names_it}", expected=f"a recipe in TOML, or one of {', '.join(names())}"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise MqoError(
            f"{path} is not a valid recipe: {first_fault(error)}",
            help="`mqo recipe show nvfp4` shows an example, and docs/recipes.md explains the keys",
        ) from None


def chosen(name: str | None, without: Iterable[str], with_: Iterable[str]) -> Recipe | None:
    """Return the recipe of that name with changes; None if the name is None.

    Raises the errors of `read` and `changed`, and MqoError for changes without a recipe.
    """
    if name is not None:
        return changed(read(name), without, with_)
    if switched := [*without, *with_]:
        raise MqoError(f"{', '.join(switched)} was given without a recipe", expected="--recipe")
    return None


def changed(recipe: Recipe, without: Iterable[str], with_: Iterable[str]) -> Recipe:
    """Return a copy without some ingredients and with others; UnknownNameError lists them."""
    without = set(without)
    for name in sorted(without):
        check_choice("ingredient", name, INGREDIENTS)
    for name in INGREDIENTS:  # in this order, so that equal changes give equal labels
        recipe = _without(recipe, name) if name in without else recipe
    for name in dict.fromkeys(with_):
        check_choice("ingredient", name, (OUTPUT_LAYER,))
        if not recipe.types.of_linear:
            raise MqoError(
                f"--with {name} changes nothing: {recipe.name} quantizes no linear layer",
                expected="a recipe with a type for fprop, dgrad or wgrad",
            )
        recipe = recipe.with_output_layer()
    return recipe


def _without(recipe: Recipe, ingredient: str) -> Recipe:
    if ingredient not in recipe.ingredients:
        raise MqoError(
            f"The recipe {recipe.name} has no {ingredient} to leave out",
            expected=f"one of {', '.join(recipe.ingredients)}"
            if recipe.ingredients
            else "no --without: this recipe has no ingredient to leave out",
        )
    return recipe.without(ingredient)
