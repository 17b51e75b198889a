"""Turn the options of a command into the recipe that is measured."""

from __future__ import annotations

from collections.abc import Iterable

from mqo.errors import MqoError
from mqo.launch.forward_pass import ForwardPass
from mqo.launch.own_formats import used_formats
from mqo.launch.own_types import OwnTypes
from mqo.launch.plugins import plugins_of, used
from mqo.matrix import tables
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_operands import KEPT, Types
from mqo.recipes import recipe as recipes


def chosen_recipe(
    mode: str | None, recipe: str | None, without: Iterable[str], with_: Iterable[str]
) -> Recipe:
    """Return the recipe, or a mode as one, without the blocks that it keeps at the ends.

    These blocks are measured as well, to see which ones to keep. A mode quantizes all three GEMMs
    of linear layers.

    Raises:
        MqoError: there is not exactly one of both, or a rule is for parts of blocks at the ends.
        UnknownNameError: there is no such mode or recipe.
    """
    if (mode is None) == (recipe is None):
        raise MqoError(
            "A sensitivity needs a way to quantize" if mode is None else "There are two ways",
            expected="either --mode, such as linear_mxfp4, or --recipe, such as nvfp4",
        )
    result = recipes.chosen(recipe, without, with_)
    if result is None:
        return _of_mode(str(mode))
    if KEPT in result.ingredients:
        result = result.without(KEPT)
    if any(rule.is_of_ends for rule in result.rules):
        raise MqoError(
            f"The recipe {result.name} has a rule for blocks at the ends that quantizes them in "
            "another way",
            expected="rules for layers or parts; or one of first and last with quant_type = 'none'",
        )
    return result


def _of_mode(name: str) -> Recipe:
    """Return a mode as a recipe, with dgrad and wgrad."""
    types = tables.pick(tables.modes(), "quantization mode", name).types("all")
    if {*types.values()} == {tables.NONE}:
        raise MqoError(f"The mode {name} quantizes nothing", expected="a mode such as linear_mxfp4")
    return Recipe(name=name, summary="", source="", types=Types(**types), output_layer=True)


def passes(recipe: Recipe, own: OwnTypes) -> ForwardPass:
    """Return how a recipe quantizes the forward and the backward pass of a saved model.

    Raises:
        FormatError, PluginError: a file changes nothing, or cannot be used.
    """
    plugins = plugins_of(own.plugins, own.options, recipe)
    names = recipe.all_types()
    result = ForwardPass(
        mode=recipe.name,
        types=recipe.types.by_site(),
        rows=recipe.rows(()),
        plugins=used(plugins, names),
        formats=used_formats(own.rows, names),
        options=recipe.options,
    )
    own.refuse_unused([result])
    return result
