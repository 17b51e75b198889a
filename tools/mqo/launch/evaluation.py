"""Run a saved model under any training mode: compute its loss on a text, or generate text.

Quant types are in the source, so each mode gets a snapshot in a temporary folder, in which a
program of the tree runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mqo.data.pair_check import check_prefix
from mqo.display import Count, Display, Say
from mqo.errors import CheckpointError, MqoError
from mqo.launch import bytecode
from mqo.launch.checkpoints import EVALUATE
from mqo.launch.flags import platform_flags
from mqo.launch.forward_pass import ForwardPass, SavedModel, forward_passes, quant_toml_of
from mqo.launch.machine import THREADS, detect, threads
from mqo.launch.options import ENVIRONMENT_VARIABLE, OPTIONS, Chosen, quant_toml
from mqo.launch.own_formats import format_rows
from mqo.launch.own_types import NO_OWN_TYPES, OwnTypes
from mqo.launch.plugins import copy_files, toml_rows
from mqo.matrix import tables
from mqo.matrix.tables import NONE
from mqo.overlay.snapshot import snapshot
from mqo.overlay.tree import Tree
from mqo.process import temporary_folder
from mqo.program import Watch, call
from mqo.quant import excludes
from mqo.quant.formats import SITES
from mqo.run_records import damaged
from mqo.runs import RunFolder
from mqo.untrusted import Limit, check_file, check_tokenizer, reading

GENERATE = "tools/generate.py"
_LARGEST = math.log(sys.float_info.max)


Request = Mapping[str, Any]  # arguments of a function of a program


def text(
    data: Sequence[Path] = (),
    file: Path | None = None,
    tokenizer: Path | None = None,
    tokens: int | None = None,
) -> dict[str, Any]:
    """Return the request for a text: indexed datasets, a file, or else the held-out data.

    `tokens` is the maximum number of predicted tokens.

    Raises:
        CheckpointError: datasets and a file are named, or a tokenizer without a file.
        DataError: a dataset does not exist.
    """
    if data and file:
        raise CheckpointError("Both --data and --text were given", expected="only one of them")
    if tokenizer and not file:
        raise CheckpointError(
            "--tokenizer was given without a text", expected="--text FILE with --tokenizer"
        )
    for prefix in data:
        check_prefix(prefix)
    choice: dict[str, Any] = {"data": [prefix.resolve() for prefix in data], "tokens": tokens}
    with reading(CheckpointError):
        if file:
            check_file(file, Limit.TEXT)
            choice["text"] = file.resolve()
    return {"choice": choice | {"tokenizer": checked_tokenizer(tokenizer)}}


def checked_tokenizer(folder: Path | None) -> Path | None:
    """Return a tokenizer's absolute path; CheckpointError if its files are not safe to read."""
    if folder is None:
        return None
    with reading(CheckpointError):
        check_tokenizer(folder)
    return folder.resolve()


@dataclass(frozen=True)
class Loss:
    """The loss of a checkpoint under a mode: `loss` in nats per token, over `tokens` tokens.

    `types` are {site: quant type} of the GEMMs that ran, `window` is in tokens, `text` names the
    text. `iteration` is None for weights that no training here saved, `modelopt` is the format to
    which ModelOpt quantizes them in any mode.
    """

    checkpoint: str
    mode: str
    types: Mapping[str, str]
    loss: float
    tokens: int
    window: int
    text: tuple[str, ...]
    iteration: int | None
    dtype: str
    seconds: float
    modelopt: str | None = None

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return math.inf if self.loss > _LARGEST else math.exp(self.loss)

    def as_table(self) -> dict[str, Any]:
        """Return the loss and perplexity for JSON."""
        return {**vars(self), "perplexity": self.perplexity}


def sampling(
    *,
    tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    cache: bool = True,
) -> dict[str, Any]:
    """Return the request for sampling; temperature 0 takes the most likely token.

    `tokens` is the maximum per prompt. CheckpointError if an option would have no effect.
    """
    if temperature == 0 and (top_k or top_p < 1):
        raise CheckpointError(
            "--top-k and --top-p change nothing at --temperature 0, which does not sample",
            expected="a --temperature above 0, such as 1",
        )
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    return {"tokens": tokens, **numbers, "cache": cache}


def evaluate(
    tree: Tree,
    models: Sequence[SavedModel],
    modes: Sequence[str],
    request: Request,
    report: Say = lambda line: None,
    own: OwnTypes = NO_OWN_TYPES,
) -> list[Loss]:
    """Return each checkpoint's loss under each mode, in this order; AS_TRAINED is its own mode.

    `request` is the result of `text`, maybe with the unknown arguments to ignore as `ignored`;
    `own` are the user's types.

    Raises:
        CheckpointError: a checkpoint or the text cannot be used.
        PluginError: a file of quantizers cannot be used, or changes nothing.
    """
    results = []
    for model, quant, facts in measured(tree, models, modes, "run", request, report, own):
        loss, texts = float(facts.pop("loss")), tuple(facts.pop("text"))
        results.append(Loss(model.name, quant.name, quant.types, loss=loss, text=texts, **facts))
    return results


def measured(
    tree: Tree,
    models: Sequence[SavedModel],
    modes: Sequence[str],
    function: str,
    request: Request,
    report: Say,
    own: OwnTypes,
) -> Iterator[tuple[SavedModel, ForwardPass, dict[str, Any]]]:
    """Yield what a function of EVALUATE finds for each checkpoint under each mode, in this order.

    Show the progress.
    """
    pairs = forward_passes(tree, models, modes, own)
    with Display.around(report).live() as display:
        for n, (model, quant) in enumerate(pairs, 1):
            name = quant.name
            display(f"{model.name}: {name}" + (f" ({n} of {len(pairs)})" if pairs[1:] else ""))
            watch = Count(display, f"  {n} of {len(pairs)}  {name}").show
            yield model, quant, run(tree, model, quant, EVALUATE, function, request, watch=watch)


def generate(
    tree: Tree,
    model: SavedModel,
    mode: str,
    prompts: Sequence[str],
    request: Request,
    tokenizer: Path | None = None,
    own: OwnTypes = NO_OWN_TYPES,
) -> dict[str, Any]:
    """Return the text after each prompt: {"mode", "types", "iteration", "texts"}.

    `request` is the result of `sampling`. Each text is {"prompt", "text", "tokens" (ids), "ended"
    ("length", or "end of document")}.

    Raises:
        CheckpointError: a checkpoint, a tokenizer or a prompt cannot be used.
    """
    own_words = {"prompts": list(prompts), "tokenizer": checked_tokenizer(tokenizer)}
    ((_, quant),) = forward_passes(tree, [model], [mode], own)
    facts = run(tree, model, quant, GENERATE, "generate", {**request, **own_words})
    return {"mode": quant.name, "types": quant.types, **facts}


def loss_lines(results: Sequence[Loss]) -> list[str]:
    """Return one table per checkpoint, with each loss and its difference to the first mode's."""
    text: list[str] = []
    by_checkpoint: dict[str, list[Loss]] = {}
    for loss in results:
        by_checkpoint.setdefault(loss.checkpoint, []).append(loss)
    for name, losses in by_checkpoint.items():
        first = losses[0]
        text += [heading(name, first.iteration, first.modelopt), *first.text]
        text.append(f"{first.tokens:,} tokens in windows of {first.window}, {first.dtype}")
        names = [tables.mode_label(loss.mode, loss.dtype) for loss in losses]
        width = max(24, *map(len, names))
        text.append(f"{'mode':<{width}} {'loss':>9} {'perplexity':>12} {'difference':>11}")
        for name, loss in zip(names, losses, strict=True):
            apart = "" if loss is first else f"{loss.loss - first.loss:+.4f}"
            row = f"{name:<{width}} {loss.loss:>9.4f} {loss.perplexity:>#12.5g} {apart:>11}"
            text.append(row.rstrip())
        text.append("")
    return text[:-1]


def heading(checkpoint: str, iteration: int | None, modelopt: str | None) -> str:
    """Return the heading of a checkpoint's table."""
    step = "" if iteration is None else f", iteration {iteration}"
    return checkpoint + step + (f", {modelopt} by ModelOpt" if modelopt else "")


def run(
    tree: Tree,
    model: SavedModel,
    quant: ForwardPass,
    program: str,
    function: str,
    request: Request,
    **watching: Watch,
) -> dict[str, Any]:
    """Call a program of a snapshot with these types and the run's options, without records."""
    machine = detect()
    with temporary_folder("mqo-evaluation-") as folder:
        source, config = folder / "source", folder / "quant.toml"
        snapshot(tree, source, types=quant.types)
        bytecode.share(tree, source)
        # Weights do not change, so quantizing each one once gives the same bits.
        options = _options(model.quant_config) if quant.options is None else {**quant.options}
        options |= {"cache_weights": True, "every": 0}
        options.pop("save_activations", None)
        _check_included(quant, options.get("include", ()))
        copy_files(quant.plugins, RunFolder(folder))
        formats, plugins = format_rows(quant.formats), toml_rows(quant.plugins)
        text = quant_toml(quant.types, options, **quant.rows, formats=formats, plugins=plugins)
        config.write_text(text, encoding="utf-8")
        whole = {"checkpoint": model.folder, "platform": platform_flags(machine), "ignored": []}
        variables = {ENVIRONMENT_VARIABLE: str(config), THREADS: threads(machine.cores)}
        chosen = {"variables": variables, "error": CheckpointError, **watching}
        return call(source / program, function, {**whole, **request}, **chosen)


def _check_included(quant: ForwardPass, include: Sequence[str]) -> None:
    """Raise CheckpointError for a site at which the run's `--include` leaves out all layers."""
    for site, kind in quant.types.items():
        named = any(excludes.is_for(pattern, SITES[site]) for pattern in include)
        if kind != NONE and include and not named:
            raise CheckpointError(
                f"{quant.name} quantizes {site}, and the run's --include names no layer there: "
                f"{', '.join(include)}",
                expected="a mode for the sites that the run quantized",
            )


def _options(config: Path | None) -> dict[str, Any]:
    """Return a run's quantizer options, with its patterns of layers."""
    record = quant_toml_of(config)
    options = {name: value for name, value in record.quantizer.items() if name in OPTIONS}
    options |= {name: patterns for name, patterns in record.layers if patterns}
    try:
        return TypeAdapter(Chosen).validate_python(options)
    except MqoError as error:
        raise damaged(config, error) from error  # type: ignore[arg-type]
