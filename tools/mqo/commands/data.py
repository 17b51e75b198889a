"""`mqo data`: prepare your own corpora for training."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import JsonOption
from mqo.display import stderr
from mqo.terminal import emit

data = typer.Typer(name="data", help="Prepare corpora of your own.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Make Typer keep the name of this group's only command, which it drops otherwise."""


@data.command()
def prepare(
    kind: Annotated[
        str, typer.Argument(help="wikipedia, dolma, jsonl, or text: one document per file.")
    ],
    input: Annotated[list[Path], typer.Option(help="Files, folders or patterns; repeatable.")],
    tokenizer: Annotated[
        Path, typer.Option(help="A folder with tokenizer.json or GPT-2's files, or a rank file.")
    ],
    output: Annotated[Path, typer.Option(help="Prefix of OUTPUT_KEY_document.bin and .idx.")],
    workers: Annotated[int, typer.Option(min=1, help="Number of threads.")] = os.cpu_count() or 1,
    key: Annotated[str, typer.Option(help="The JSON key or column of the text.")] = "text",
    strict: Annotated[bool, typer.Option("--strict", help="Stop at a bad document.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize a corpus into the pair of files that training reads."""
    from mqo.data.corpus import find
    from mqo.data.preprocess import build_index

    find(input, kind)
    key = "text" if kind == "text" else key
    counts = build_index(
        kind, input, tokenizer, output, key=key, workers=workers, strict=strict, report=stderr()
    )
    prefix = output.with_name(f"{output.name}_{key}_document")
    text = f"{counts.documents:,} documents, {counts.tokens:,} tokens: {prefix}"
    emit("data prepare", counts, text, as_json, prefix=prefix)
