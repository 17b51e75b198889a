"""`mqo convert`: convert weights from and to Hugging Face's format, and finalize students."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import IgnoreOption, JsonOption, TokenizerOption, TreeOption, root_of
from mqo.display import stderr
from mqo.output import target_of
from mqo.terminal import emit

convert = typer.Typer(
    name="convert",
    help="Convert weights from and to Hugging Face's format, and finalize a student.",
    no_args_is_help=True,
)


@convert.command()
def hf_to_megatron(
    source: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(help="A new folder for the checkpoint.")],
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Make a checkpoint that a training starts from."""
    from mqo.launch.convert import hf_to_megatron as make

    result = make(root_of(tree), source.resolve(), target_of(target), stderr())
    emit("convert", result, "\n".join(result.lines()), as_json)


@convert.command()
def finalize(
    source: Annotated[Path, typer.Argument(help="A distillation's run or checkpoint folder.")],
    target: Annotated[Path, typer.Argument(help="A new folder for the checkpoint.")],
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Make a plain model's checkpoint of a student, without projections and optimizer."""
    from mqo.launch.convert import finalize as make

    result = make(root_of(tree), source.resolve(), target_of(target), stderr())
    emit("convert", result, "\n".join(result.lines()), as_json)


@convert.command()
def megatron_to_hf(
    source: Annotated[Path, typer.Argument(help="A run or checkpoint folder; uses the newest.")],
    target: Annotated[Path, typer.Argument(help="A new folder that transformers can load.")],
    tokenizer: TokenizerOption = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Rows to keep; by default one per token.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; by default the checkpoint's.")
    ] = None,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Make a folder that transformers loads, with its tokenizer and a model card."""
    from mqo.launch.convert import megatron_to_hf as make
    from mqo.matrix import tables

    kind = tables.check_dtype(dtype)
    paths = source.resolve(), target_of(target), tokenizer and tokenizer.resolve()
    result = make(root_of(tree), *paths, vocab_size, kind, stderr(), ignore_argument or ())
    emit("convert", result, "\n".join(result.lines()), as_json)
