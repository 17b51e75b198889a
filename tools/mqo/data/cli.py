"""`mqo data`: corpora of one's own for training."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mqo.display import stderr
from mqo.terminal import JsonOption, emit

data = typer.Typer(help="Prepare corpora of your own.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Keep the name of the group's only command, as a callback does."""


@data.command()
def prepare(
    kind: Annotated[
        str, typer.Argument(help="wikipedia, dolma, jsonl, or text: a document a file.")
    ],
    input: Annotated[list[Path], typer.Option(help="Files, folders or patterns; repeatable.")],
    tokenizer: Annotated[
        Path, typer.Option(help="A folder with tokenizer.json or GPT-2's files, or a rank file.")
    ],
    output: Annotated[Path, typer.Option(help="Prefix of OUTPUT_KEY_document.bin and .idx.")],
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = os.cpu_count() or 1,
    key: Annotated[str, typer.Option(help="The JSON key or column of the text.")] = "text",
    strict: Annotated[bool, typer.Option("--strict", help="Stop at a bad document.")] = False,
    engine: Annotated[str, typer.Option(help="auto, tiktoken or tokenizers.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Tokenize a corpus into the pair of files that training reads; repeated, it continues."""
    from mqo.data.corpus import find
    from mqo.data.encode import ENGINES, load
    from mqo.data.meter import Meter
    from mqo.data.pipeline import Job, index
    from mqo.errors import check_name

    check_name("engine", engine, ENGINES)
    keys = ("text",) if kind == "text" else (key,)
    files = tuple(find(input, kind))
    job = Job(files, kind, keys, load(tokenizer, engine), output, strict=strict)
    state = index(job, workers, Meter(stderr()))
    prefix = output.with_name(f"{output.name}_{keys[0]}_document")
    text = f"{state.documents:,} documents, {state.tokens:,} tokens: {prefix}"
    emit("data prepare", state, text, as_json, prefix=prefix)
