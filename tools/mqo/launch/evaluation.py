"""Run a saved model under any training mode: compute its loss on a text, or generate text.

Quant types are in the source, so each mode gets a snapshot in a temporary folder, in which a
program of the tree runs.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from mqo.data.pair_check import check_prefix
from mqo.display import Count, Display, Say
from mqo.errors import CheckpointError, MqoError
from mqo.launch import bytecode
from mqo.launch.checkpoints import TRACKER, require_files, require_tracker
from mqo.launch.flags import platform_flags
from mqo.launch.hf_source import refuse_hf_folder
from mqo.launch.machine import THREADS, detect, threads
from mqo.launch.options import ENVIRONMENT_VARIABLE, OPTIONS, Chosen, quant_toml
from mqo.launch.published_args import IGNORE_FLAG
from mqo.matrix import tables
from mqo.overlay.snapshot import snapshot
from mqo.overlay.tree import Tree
from mqo.process import temporary_folder
from mqo.program import Watch, ask
from mqo.run_records import QuantToml, damaged, parsed
from mqo.runs import RunFolder, checkpoints_of
from mqo.untrusted import Limit, check_file, check_tokenizer, reading

EVALUATE, GENERATE = "tools/evaluate.py", "tools/generate.py"
Measured = TypeVar("Measured")
_ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
BACKWARD = ("dgrad", "wgrad")  # sites that no evaluation runs
AS_TRAINED = "as trained"
_LARGEST = math.log(sys.float_info.max)


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint to run: its name in tables, its folder, and its run's quant.toml if any."""

    name: str
    folder: Path
    quant_config: Path | None

    @classmethod
    def find(cls, path: Path) -> SavedModel:
        """Return the model at `path`: a run, a folder of checkpoints, or one iteration's folder.

        Raises:
            CheckpointError: it holds no checkpoint.
        """
        path = path.resolve()
        folder = checkpoints_of(path)
        if not (folder / "metadata.json").is_file():
            if not (folder / TRACKER).is_file():
                refuse_hf_folder(path, CheckpointError)
            expected = f"a run that saved, a folder with {TRACKER}, or the folder of an iteration"
            require_tracker(folder, CheckpointError, expected)
        else:
            require_files(folder, CheckpointError)
        near = (path, *folder.parents[:2])
        options = [RunFolder(root).quant_config for root in near]
        config = next((file for file in options if file.is_file()), None)
        return cls(config.parent.name if config else path.name, folder, config)


def text(
    data: Sequence[Path] = (),
    file: Path | None = None,
    tokenizer: Path | None = None,
    tokens: int | None = None,
) -> list[str]:
    """Return the options that name the text: indexed datasets, a file, or else the held-out data.

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
    words = [word for prefix in data for word in ("--data", str(prefix.resolve()))]
    with reading(CheckpointError):
        if file:
            check_file(file, Limit.TEXT)
            words += ["--text", str(file.resolve())]
    words += tokenizer_words(tokenizer)
    return words + (["--tokens", str(tokens)] if tokens else [])


def tokenizer_words(folder: Path | None) -> list[str]:
    """Return the option for a tokenizer; CheckpointError if its files are not safe to read."""
    if folder is None:
        return []
    with reading(CheckpointError):
        check_tokenizer(folder)
    return ["--tokenizer", str(folder.resolve())]


def ignoring(names: Sequence[str]) -> list[str]:
    """Return the options that make a program accept unknown arguments of a checkpoint."""
    return [f"{IGNORE_FLAG}={name}" for name in names]


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
    *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, cache: bool = True, **rest: int
) -> list[str]:
    """Return the options for sampling; temperature 0 takes the most likely token.

    `rest` has `tokens`, the maximum per prompt, and `seed`. CheckpointError if an option would have
    no effect.
    """
    if temperature == 0 and (top_k or top_p < 1):
        raise CheckpointError(
            "--top-k and --top-p change nothing at --temperature 0, which does not sample",
            expected="a --temperature above 0, such as 1",
        )
    numbers = {"temperature": temperature, "top-k": top_k, "top-p": top_p, **rest}
    words = [f"--{name}={value}" for name, value in numbers.items()]
    return words + ([] if cache else ["--no-cache"])


def evaluate(
    tree: Tree,
    models: Sequence[SavedModel],
    modes: Sequence[str],
    words: Sequence[str] = (),
    report: Say = lambda line: None,
) -> list[Loss]:
    """Return each checkpoint's loss under each mode, in this order; AS_TRAINED is its own mode.

    `words` is the result of `text`.

    Raises:
        CheckpointError: a checkpoint or the text cannot be used.
    """

    def measure(model: SavedModel, quant: ForwardPass, watch: Watch) -> Loss:
        before = ["run", str(model.folder)]
        facts = run(tree, model, quant, EVALUATE, before, words, watch=watch)
        loss, texts = float(facts.pop("loss")), tuple(facts.pop("text"))
        return Loss(model.name, quant.name, quant.types, loss=loss, text=texts, **facts)

    return each(tree, models, modes, measure, report)


def each(
    tree: Tree,
    models: Sequence[SavedModel],
    modes: Sequence[str],
    measure: Callable[[SavedModel, ForwardPass, Watch], Measured],
    report: Say,
) -> list[Measured]:
    """Measure each checkpoint under each mode, in this order, and show the progress."""
    results = []
    pairs = [(model, mode) for model in models for mode in modes]
    with Display.around(report).live() as display:
        for n, (model, mode) in enumerate(pairs, 1):
            quant = forward_pass(tree, model, mode)
            name = quant.name
            display(f"{model.name}: {name}" + (f" ({n} of {len(pairs)})" if pairs[1:] else ""))
            count = Count(display, f"  {n} of {len(pairs)}  {name}")
            results.append(measure(model, quant, count.show))
    return results


def generate(
    tree: Tree,
    model: SavedModel,
    mode: str,
    prompts: Sequence[str],
    words: Sequence[str] = (),
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Return the text after each prompt: {"mode", "types", "iteration", "texts"}.

    `words` is the result of `sampling`. Each text is {"prompt", "text", "tokens" (ids), "ended"
    ("length", or "end of document")}.

    Raises:
        CheckpointError: a checkpoint, a tokenizer or a prompt cannot be used.
    """
    words = [*words]
    words += tokenizer_words(tokenizer)
    quant = forward_pass(tree, model, mode)
    with temporary_folder("mqo-generate-") as folder:
        file = folder / "prompts.json"
        file.write_text(json.dumps(list(prompts)), encoding="utf-8")
        words += ["--prompts", str(file)]
        facts = run(tree, model, quant, GENERATE, [str(model.folder)], words)
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
        text.append(f"{'mode':<24} {'loss':>9} {'perplexity':>12} {'difference':>11}")
        for loss in losses:
            apart = "" if loss is first else f"{loss.loss - first.loss:+.4f}"
            name = tables.mode_label(loss.mode, loss.dtype)
            row = f"{name:<24} {loss.loss:>9.4f} {loss.perplexity:>#12.5g} {apart:>11}"
            text.append(row.rstrip())
        text.append("")
    return text[:-1]


def heading(checkpoint: str, iteration: int | None, modelopt: str | None) -> str:
    """Return the heading of a checkpoint's table."""
    step = "" if iteration is None else f", iteration {iteration}"
    return checkpoint + step + (f", {modelopt} by ModelOpt" if modelopt else "")


@dataclass(frozen=True)
class ForwardPass:
    """How a forward pass is quantized: a mode's name, {site: type}, and rows of a recipe."""

    name: str
    types: dict[str, str]
    rows: dict[str, Any]


def forward_pass(tree: Tree, model: SavedModel, mode: str) -> ForwardPass:
    """Return how a mode quantizes the GEMMs of a forward pass.

    For AS_TRAINED that is recorded in the checkpoint and in its run's recipe. Without a record
    nothing is quantized: no quantized training wrote the checkpoint.
    """
    if mode != AS_TRAINED:
        types = tables.pick(tables.modes(), "quantization mode", mode).types()
        return ForwardPass(mode, _forward(types), {})
    words = ["describe", str(model.folder)]
    facts = ask(tree.root / EVALUATE, words, variables=_ON_CPU, error=CheckpointError)
    types = _forward(facts["types"])
    if facts["rows"] and model.quant_config is None:
        raise CheckpointError(
            f"{model.folder} was trained with a recipe, and there is no quant.toml next to it",
            expected="a copy of its quant.toml in that folder, or the run itself",
            help="To run it without the recipe, name a mode",
        )
    if rows := recipe_rows(model.quant_config, types):
        return ForwardPass(AS_TRAINED, types, rows)
    for name, known in tables.modes().items():
        if _forward(known.types()) == types:
            return ForwardPass(name, types, {})
    return ForwardPass(AS_TRAINED, types, {})


def _forward(types: Mapping[str, str]) -> dict[str, str]:
    return {site: types.get(site, tables.NONE) for site in tables.SITES if site not in BACKWARD}


def run(
    tree: Tree,
    model: SavedModel,
    quant: ForwardPass,
    program: str,
    before: Sequence[str],
    words: Sequence[str],
    **watching: Watch,
) -> dict[str, Any]:
    """Run a program on a snapshot with these types and the run's options, without records."""
    machine = detect()
    with temporary_folder("mqo-evaluation-") as folder:
        source, config = folder / "source", folder / "quant.toml"
        snapshot(tree, source, types=quant.types)
        bytecode.share(tree, source)
        # Weights do not change, so quantizing each one once gives the same bits.
        options = _options(model.quant_config) | {"cache_weights": True, "every": 0}
        options.pop("save_activations", None)
        config.write_text(quant_toml(quant.types, options, **quant.rows), encoding="utf-8")
        after = [*words, "--", *platform_flags(machine)]
        variables = {ENVIRONMENT_VARIABLE: str(config), THREADS: threads(machine.cores)}
        chosen = {"variables": variables, "error": CheckpointError, **watching}
        return ask(source / program, before, after=after, **chosen)


def _options(config: Path | None) -> dict[str, Any]:
    """Return a run's quantizer options, with the layers that it excluded."""
    record = _said(config)
    options = {name: value for name, value in record.quantizer.items() if name in OPTIONS}
    options |= {"exclude": record.layers.exclude} if record.layers.exclude else {}
    try:
        return TypeAdapter(Chosen).validate_python(options)
    except MqoError as error:
        raise damaged(config, error) from error  # type: ignore[arg-type]


def recipe_rows(config: Path | None, types: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows of a run's recipe for `quant_toml`, if `types` occur in its schedule."""
    record = _said(config)
    for site, quant_type in _forward(types).items():
        later = re.findall(r"\w+", record.schedule.get(site, ""))
        if quant_type not in (tables.NONE, record.asked.get(site, tables.NONE), *later):
            return {}
    return {name: rows for name in ("operands", "rules") if (rows := getattr(record, name))}


def _said(config: Path | None) -> QuantToml:
    """Return the content of a quant.toml; an empty one if `config` is None."""
    return parsed(config, QuantToml) if config else QuantToml()
