"""`mqo export`: write trained weights as codes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import IgnoreOption, JsonOption, TreeOption, root_of
from mqo.display import stderr
from mqo.output import target_of
from mqo.terminal import emit


def export(
    source: Annotated[Path, typer.Argument(help="A run, checkpoint or transformers folder.")],
    target: Annotated[Path, typer.Argument(help="A new folder that other programs can load.")],
    quant_type: Annotated[
        str | None, typer.Option("--format", help="One type for all; default: the run's types.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="compressed-tensors, fp8 or mqo; default: the first that fits."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Round to fp32, bf16 or fp16 first.")] = None,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Write trained weights as codes and scales, and print which programs can load them."""
    from mqo.launch.export import export as write
    from mqo.matrix import tables

    kind = tables.check_dtype(dtype)
    paths = source.resolve(), target_of(target)
    result = write(root_of(tree), *paths, quant_type, layout, kind, stderr(), ignore_argument or ())
    emit("export", result, "\n".join(result.lines()), as_json)
