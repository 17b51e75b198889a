"""`mqo coverage`: show the matrix products of a training step, and which are quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mqo.commands.options import JsonOption, TreeOption, settled
from mqo.errors import MqoError
from mqo.project import Project
from mqo.terminal import emit

if TYPE_CHECKING:
    import argparse

# Arguments of a training that do not change its matrix products.
_UNREAD = (
    *("checkpoint", "tensorboard", "runs", "tracker", "megatron", "dry_run", "device", "list"),
    *("take_lock", "allow_edits", "version", "teacher", "distillation_config"),
)


def _refuse_unread(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raise MqoError for the first argument that the coverage does not depend on."""
    for name in _UNREAD:
        if getattr(args, name) != parser.get_default(name):
            raise MqoError(
                f"--{name.replace('_', '-')} has no effect on a coverage"
                if name not in ("checkpoint", "tensorboard")
                else f"The argument {name.upper()} has no effect on a coverage",
                expected="only options that change what a step computes",
                help="--tree PATH names another tree" if name == "megatron" else "",
            )


def coverage(context: typer.Context, as_json: JsonOption = False, tree: TreeOption = None) -> None:
    """Show every matrix product of a training step, its type, and the share that is quantized.

    Other arguments are those of a training: --model, --mode or --recipe,
    --training-config for the sizes, its other options, and Megatron's flags
    after `--`.
    """
    from mqo.launch import arguments
    from mqo.launch import coverage as program
    from mqo.launch.checks import check_layers
    from mqo.matrix import tables
    from mqo.overlay.series import Series
    from mqo.quant.formats import SITES

    project = Project.here()
    flags = list(context.obj)
    parser = arguments.parser()
    args = parser.parse_intermixed_args(context.args)
    _refuse_unread(parser, args)
    args.dataset = args.dataset or next(iter(tables.datasets()))  # the sizes do not depend on it
    config = arguments.config_from(args, flags)
    result = program.of_config(project, settled(tree), Series.of_project(project), config)
    names: dict[str, list[str]] = {}
    for site, layers in result.layers_by_site().items():
        names.setdefault(SITES[site].layer, layers)
    check_layers(config, config.quantization.types, names)
    differing = program.differing_layers(config, result)
    facts = program.names(config) | result.as_table() | {"differing": differing}
    emit("coverage", None, program.as_text(config, result).rstrip(), as_json, **facts)
