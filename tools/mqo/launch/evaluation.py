"""Runs a saved model under any training mode: computes its loss on a text, or generates text.

Quant types are in the source, so each mode has its own snapshot in a temporary folder. A program of
the tree runs there.
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
BACKWARD = ("dgrad", "wgrad")  # sites that no evaluation reaches
AS_TRAINED = "as trained"
_LARGEST = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Place:
    """A checkpoint to run: its name for people, its folder, and the run's quant.toml if any."""

    name: str
    folder: Path
    quant_config: Path | None

    @classmethod
    def of(cls, path: Path) -> Place:
        """Return what `path` means: a run, a folder of checkpoints, or that of one iteration.

        Raises:
            CheckpointError: it holds none.
        """
        path = path.resolve()
        folder = checkpoints_of(path)
        if not (folder / "metadata.json").is_file():
            if not (folder / TRACKER).is_file():
                refuse_hf_folder(path, CheckpointError)
            expected = f"a run that saved, a folder with {TRACKER}, or that of an iteration"
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
    """Name what is evaluated: indexed datasets whole, or a file; without either what was held out.

    `tokens` is how many are predicted at most.

    Raises:
        CheckpointError: two texts are named, or a tokenizer without a file.
        DataError: there is no such dataset.
    """
    if data and file:
        raise CheckpointError("Both --data and --text were given", expected="one of them")
    if tokenizer and not file:
        raise CheckpointError(
            "A tokenizer was given and no text", expected="--text FILE beside --tokenizer"
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
    """Return the words that name a tokenizer; CheckpointError if its files are not safe to read."""
    if folder is None:
        return []
    with reading(CheckpointError):
        check_tokenizer(folder)
    return ["--tokenizer", str(folder.resolve())]


def ignoring(names: Sequence[str]) -> list[str]:
    """Return the words by which a program accepts unknown arguments of a checkpoint."""
    return [f"{IGNORE_FLAG}={name}" for name in names]


@dataclass(frozen=True)
class Loss:
    """What a checkpoint loses under a mode: `loss` in nats per token, over `tokens` of them.

    `types` are {site: quant type} of the GEMMs that ran, `window` is in tokens, `text` names what
    was read. `iteration` is None for weights that no training here has saved, `modelopt` the format
    that ModelOpt quantizes them to, whatever the mode.
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
        """Return the row for JSON."""
        return {**vars(self), "perplexity": self.perplexity}


def sampling(
    *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, cache: bool = True, **rest: int
) -> list[str]:
    """Return the options of sampling; temperature 0 takes the most likely token.

    The `rest` are `tokens`, the maximum per prompt, and `seed`. CheckpointError if an option would
    have no effect.
    """
    if temperature == 0 and (top_k or top_p < 1):
        raise CheckpointError(
            "--top-k and --top-p choose what is drawn from, and temperature 0 draws nothing",
            expected="a --temperature above 0, such as 1",
        )
    numbers = {"temperature": temperature, "top-k": top_k, "top-p": top_p, **rest}
    words = [f"--{name}={value}" for name, value in numbers.items()]
    return words + ([] if cache else ["--no-cache"])


def evaluate(
    tree: Tree,
    places: Sequence[Place],
    modes: Sequence[str],
    words: Sequence[str] = (),
    report: Say = lambda line: None,
) -> list[Loss]:
    """Return each checkpoint's loss under each mode, in this order; AS_TRAINED is the run's own.

    `words` are what `text` returned.

    Raises:
        CheckpointError: a checkpoint or a text that does not do.
    """

    def measure(place: Place, how: How, watch: Watch) -> Loss:
        before = ["run", str(place.folder)]
        facts = run(tree, place, how, EVALUATE, before, words, watch=watch)
        loss, texts = float(facts.pop("loss")), tuple(facts.pop("text"))
        return Loss(place.name, how.name, how.types, loss=loss, text=texts, **facts)

    return each(tree, places, modes, measure, report)


def each(
    tree: Tree,
    places: Sequence[Place],
    modes: Sequence[str],
    measure: Callable[[Place, How, Watch], Measured],
    report: Say,
) -> list[Measured]:
    """Measure each checkpoint under each mode, in this order, and show how far it is."""
    found = []
    pairs = [(place, mode) for place in places for mode in modes]
    with Display.around(report).live() as display:
        for n, (place, mode) in enumerate(pairs, 1):
            how = how_of(tree, place, mode)
            name = how.name
            display(f"{place.name}: {name}" + (f" ({n} of {len(pairs)})" if pairs[1:] else ""))
            count = Count(display, f"  {n} of {len(pairs)}  {name}")
            found.append(measure(place, how, count.show))
    return found


def generate(
    tree: Tree,
    place: Place,
    mode: str,
    prompts: Sequence[str],
    words: Sequence[str] = (),
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Return what follows each prompt: {"mode", "types", "iteration", "texts"}.

    `words` are what `sampling` returned. Each text is {"prompt", "text", "tokens" (ids), "ended"
    ("length", or "end of document")}.

    Raises:
        CheckpointError: a checkpoint, a tokenizer or a prompt that does not do.
    """
    words = [*words]
    words += tokenizer_words(tokenizer)
    how = how_of(tree, place, mode)
    with temporary_folder("mqo-generate-") as folder:
        file = folder / "prompts.json"
        file.write_text(json.dumps(list(prompts)), encoding="utf-8")
        words += ["--prompts", str(file)]
        facts = run(tree, place, how, GENERATE, [str(place.folder)], words)
    return {"mode": how.name, "types": how.types, **facts}


def lines(found: Sequence[Loss]) -> list[str]:
    """Return a table a checkpoint; its losses also as differences from its first mode's."""
    text: list[str] = []
    by_place: dict[str, list[Loss]] = {}
    for one in found:
        by_place.setdefault(one.checkpoint, []).append(one)
    for name, losses in by_place.items():
        first = losses[0]
        text += [heading(name, first.iteration, first.modelopt), *first.text]
        text.append(f"{first.tokens:,} tokens in windows of {first.window}, {first.dtype}")
        text.append(f"{'mode':<24} {'loss':>9} {'perplexity':>12} {'difference':>11}")
        for one in losses:
            apart = "" if one is first else f"{one.loss - first.loss:+.4f}"
            name = tables.mode_label(one.mode, one.dtype)
            row = f"{name:<24} {one.loss:>9.4f} {one.perplexity:>#12.5g} {apart:>11}"
            text.append(row.rstrip())
        text.append("")
    return text[:-1]


def heading(checkpoint: str, iteration: int | None, modelopt: str | None) -> str:
    """Return the heading of a checkpoint's table."""
    step = "" if iteration is None else f", iteration {iteration}"
    return checkpoint + step + (f", {modelopt} by ModelOpt" if modelopt else "")


@dataclass(frozen=True)
class How:
    """What a forward pass quantizes: a mode's name, {site: type}, and rows of a recipe's."""

    name: str
    types: dict[str, str]
    rows: dict[str, Any]


def how_of(tree: Tree, place: Place, mode: str) -> How:
    """Return what a mode quantizes of the GEMMs that a forward pass has.

    Of AS_TRAINED what the checkpoint says, and its run's recipe; nothing quantized where it says
    nothing: then no quantized training wrote it.
    """
    if mode != AS_TRAINED:
        types = tables.pick(tables.modes(), "quantization mode", mode).types()
        return How(mode, _forward(types), {})
    words = ["describe", str(place.folder)]
    facts = ask(tree.root / EVALUATE, words, variables=_ON_CPU, error=CheckpointError)
    types = _forward(facts["types"])
    if facts["rows"] and place.quant_config is None:
        raise CheckpointError(
            f"{place.folder} was trained by a recipe, and no quant.toml is beside it",
            expected="a copy of the run's quant.toml in that folder, or the run itself",
            help="Naming a mode runs it in that one in place of the recipe",
        )
    if rows := recipe_rows(place.quant_config, types):
        return How(AS_TRAINED, types, rows)
    for name, known in tables.modes().items():
        if _forward(known.types()) == types:
            return How(name, types, {})
    return How(AS_TRAINED, types, {})


def _forward(types: Mapping[str, str]) -> dict[str, str]:
    return {site: types.get(site, tables.NONE) for site in tables.SITES if site not in BACKWARD}


def run(
    tree: Tree,
    place: Place,
    how: How,
    program: str,
    before: Sequence[str],
    words: Sequence[str],
    **watching: Watch,
) -> dict[str, Any]:
    """Run a program on a snapshot with these types and the run's options, without records."""
    machine = detect()
    with temporary_folder("mqo-evaluation-") as folder:
        source, config = folder / "source", folder / "quant.toml"
        snapshot(tree, source, types=how.types)
        bytecode.share(tree, source)
        # No weight changes: to quantize each one once gives the same bits.
        options = _options(place.quant_config) | {"cache_weights": True, "every": 0}
        options.pop("save_activations", None)
        config.write_text(quant_toml(how.types, options, **how.rows), encoding="utf-8")
        after = [*words, "--", *platform_flags(machine)]
        variables = {ENVIRONMENT_VARIABLE: str(config), THREADS: threads(machine.cores)}
        chosen = {"variables": variables, "error": CheckpointError, **watching}
        return ask(source / program, before, after=after, **chosen)


def _options(config: Path | None) -> dict[str, Any]:
    """Return how a run quantized: its options, and the layers that it left out."""
    said = _said(config)
    options = {name: value for name, value in said.quantizer.items() if name in OPTIONS}
    options |= {"exclude": said.layers.exclude} if said.layers.exclude else {}
    try:
        return TypeAdapter(Chosen).validate_python(options)
    except MqoError as error:
        raise damaged(config, error) from error  # type: ignore[arg-type]


def recipe_rows(config: Path | None, types: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows of a run's recipe for `quant_toml`, where `types` are of a phase of it."""
    said = _said(config)
    for site, quant_type in _forward(types).items():
        later = re.findall(r"\w+", said.schedule.get(site, ""))
        if quant_type not in (tables.NONE, said.asked.get(site, tables.NONE), *later):
            return {}
    return {name: rows for name in ("operands", "rules") if (rows := getattr(said, name))}


def _said(config: Path | None) -> QuantToml:
    """Return what a quant.toml says; nothing without one."""
    return parsed(config, QuantToml) if config else QuantToml()
