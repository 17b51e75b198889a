"""`mqo generate`: generate text from prompts with a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import (
    CHECKPOINTS,
    FormatsOption,
    IgnoreOption,
    JsonOption,
    PluginOption,
    PluginOptionOption,
    TokenizerOption,
    TreeOption,
    settled,
)
from mqo.errors import CheckpointError
from mqo.terminal import emit
from mqo.untrusted import read_text, reading


def generate(
    checkpoint: Annotated[Path, typer.Argument(help=CHECKPOINTS)],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most likely token.")] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many most likely tokens; 0: all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample from tokens up to this total probability."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    mode: Annotated[str | None, typer.Option(help="A mode; by default the run's mode.")] = None,
    tokenizer: TokenizerOption = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Recompute the whole text for each token.")
    ] = False,
    formats: FormatsOption = None,
    plugin: PluginOption = None,
    plugin_option: PluginOptionOption = None,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Generate text from prompts with a checkpoint."""
    from mqo.launch import evaluation
    from mqo.launch.forward_pass import AS_TRAINED, SavedModel
    from mqo.launch.own_types import OwnTypes

    given = [*(prompt or ()), *(_lines(prompts) if prompts else ())]
    if not given:
        raise CheckpointError("No prompt was given", expected="--prompt TEXT, or --prompts FILE")
    request = evaluation.sampling(
        tokens=tokens,
        cache=not no_cache,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    request |= {"ignored": ignore_argument or []}
    own = OwnTypes.from_options(formats, plugin, plugin_option)
    source, mode = SavedModel.find(checkpoint), mode or AS_TRAINED
    more = (request, tokenizer, own)
    result = evaluation.generate(settled(tree), source, mode, given, *more)
    written = "\n\n".join(row["prompt"] + row["text"] for row in result["texts"])
    emit("generate", None, written, as_json, **result)


def _lines(file: Path) -> list[str]:
    with reading(CheckpointError):
        text = read_text(file)
    return [line for line in text.splitlines() if line.strip()]
