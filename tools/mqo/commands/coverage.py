"""`mqo coverage`: show the matrix products of a training step, and which are quantized."""

from __future__ import annotations

from typing import Annotated

import typer

from mqo.commands.options import (
    OWN_MODEL,
    GemmsOption,
    JsonOption,
    PluginOption,
    PluginOptionOption,
    ShrinkOption,
    TreeOption,
    WithOption,
    WithoutOption,
    settled,
)
from mqo.errors import MqoError
from mqo.project import Project
from mqo.terminal import emit


def coverage(
    model: Annotated[str, typer.Option(help=f"A model, {OWN_MODEL}.")],
    mode: Annotated[
        str | None, typer.Option(help="A mode, or 'source' for the types in the tree.")
    ] = None,
    gemms: GemmsOption = "fprop",
    recipe: Annotated[str | None, typer.Option(help="A recipe for the linear layers.")] = None,
    without: WithoutOption = None,
    with_: WithOption = None,
    plugin: PluginOption = None,
    plugin_option: PluginOptionOption = None,
    training_config: Annotated[str, typer.Option(help="Sets the sizes.")] = "standard",
    shrink: ShrinkOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Show every matrix product of a training step, its type, and the share that is quantized."""
    from mqo.launch import coverage as program
    from mqo.launch.config import resolve
    from mqo.launch.models import shrink_of
    from mqo.launch.plugins import PluginChoice
    from mqo.matrix import tables
    from mqo.overlay.series import Series
    from mqo.recipes.recipe import chosen

    project = Project.here()
    plugins = PluginChoice.from_options(plugin, plugin_option)  # before names are checked
    choice = tables.check_gemms(gemms)
    chosen_recipe = chosen(recipe, without or (), with_ or ())
    if mode is None and chosen_recipe is None:
        raise MqoError("Neither --mode nor --recipe was given", expected="at least one of them")
    mode = mode or tables.UNQUANTIZED  # for attention, which recipes do not quantize
    # The sizes do not depend on the dataset.
    dataset = next(iter(tables.datasets()))
    config = resolve(
        model,
        dataset,
        mode,
        training_config,
        gemms=choice,
        shrink=shrink_of(shrink),
        recipe=chosen_recipe,
        plugins=plugins.files,
        plugin_options=plugins.options,
    )
    plugins.refuse_unused([config.quantization])
    result = program.of_config(project, settled(tree), Series.of_project(project), config)
    differing = program.differing_layers(config, result)
    facts = program.names(config) | result.as_table() | {"differing": differing}
    emit("coverage", None, program.as_text(config, result).rstrip(), as_json, **facts)
