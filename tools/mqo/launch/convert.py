"""Convert weights between Hugging Face folders and upstream's checkpoints.

This module reads the shapes of both sides; Megatron-LM/tools/convert.py, a process on the tree,
converts the weights. The target appears by a rename when it is complete, or not at all.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.display import Say
from mqo.errors import ConvertError, DiskFullError, RunError, full_disk_of, is_full
from mqo.extras import require
from mqo.launch import hf_tokenizer, model_card
from mqo.launch.architecture import architecture_flags
from mqo.launch.checkpoints import require_tracker, tracked
from mqo.launch.families import family_of_shape
from mqo.launch.families.nemotron_h import NEMOTRON_H
from mqo.launch.flags import DTYPES, platform_flags
from mqo.launch.hf_config import (
    config_of,
    context_of,
    dtype_of_args,
    notes_on,
    shape_of_args,
    shape_of_config,
)
from mqo.launch.hf_source import CONFIG, check_hf_folder, refuse_hf_folder
from mqo.launch.machine import Machine
from mqo.launch.published_args import check_published
from mqo.launch.size import check_size
from mqo.matrix.tables import Dtype, Shape
from mqo.megatron.run.files import TRACKER
from mqo.megatron.run.gpt_blocks import FRESH, as_gpt, given_pattern
from mqo.output import target_of
from mqo.process import temporary_folder
from mqo.program import Advance, call
from mqo.runs import checkpoints_of, run_of

PROGRAM = "tools/convert.py"
_OPTIONS: dict[str, Any] = {"variables": {"CUDA_VISIBLE_DEVICES": ""}, "error": ConvertError}
_NO_ROOM = 1 << 16  # free bytes below which a disk is full for weights


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    `flags` build the same model in Megatron's programs. `notes` are for the user, one or two
    sentences each.
    """

    target: str
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        flags = [f"model flags: {shlex.join(self.flags)}"] if self.flags else []
        return [self.target, *flags, *(f"note: {note}" for note in self.notes)]


@dataclass(frozen=True)
class Trained:
    """A checkpoint that transformers can express: its folder, its training, its tokenizer.

    The vocabulary of `shape` has only the kept tokens, `sequence` is in tokens. `notes` are those
    of Converted. `is_hybrid` says that a HybridModel was trained.
    """

    folder: Path
    training: model_card.Training
    shape: Shape
    sequence: int
    tokenizer: Path | None
    notes: tuple[str, ...]
    is_hybrid: bool


def hf_to_megatron(
    tree: Path, source: Path, target: Path, report: Say = lambda line: None
) -> Converted:
    """Write the weights in the folder `source` as a checkpoint that a training can start from.

    Their dtype stays; if they have several, the checkpoint has fp32. `report` gets a line for each
    stage.
    """
    check_hf_folder(source)
    config = hf_tokenizer.read_json(source / CONFIG)
    shape, sequence = shape_of_config(config), context_of("config.json", config)
    check_size("config.json", shape)
    with staged(target) as stage:
        _run(tree, "to_megatron", source, stage, program_flags(shape, sequence), report)
    return Converted(str(target), tuple(architecture_flags(shape, sequence)), notes_on(config))


def megatron_to_hf(
    tree: Path,
    source: Path,
    target: Path,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    dtype: Dtype | None = None,
    report: Say = lambda line: None,
    ignored: Collection[str] = (),
) -> Converted:
    """Write a checkpoint's newest weights as a folder that transformers loads.

    `source` is a run, or a folder of checkpoints. `tokenizer` is the folder of a tokenizer, by
    default the training's. `vocab_size` is in rows of the embedding, by default the tokenizer's.
    `dtype` is that of the files, by default the checkpoint's. `ignored` are unknown arguments of
    the checkpoint that the user accepts.

    Raises:
        ConvertError: `source` holds no checkpoint that transformers can express; `tokenizer` does
            not fit; a value is too large for `dtype`; `target` exists.
    """
    checkpoint = trained(tree, source, tokenizer, vocab_size, ignored, takes_mamba=True)
    with staged(target) as stage:
        write_in_full(tree, checkpoint, stage, dtype, report)
        model_card.write(stage, target.name, checkpoint.training)
    return Converted(str(target), notes=checkpoint.notes)


def finalize(tree: Path, source: Path, target: Path, report: Say = lambda line: None) -> Converted:
    """Write the newest weights of a distilled student as a checkpoint of a plain model.

    `source` is a run, or a folder of checkpoints. The checkpoint starts a training, or serves
    programs that know nothing of distillation. `report` gets a line for each stage.
    """
    checkpoint = checkpoints_of(source)
    require_tracker(checkpoint, ConvertError, f"a run that saved, or a folder with {TRACKER}")
    with staged(target) as stage:
        _run(tree, "finalize", checkpoint, stage, platform_flags(Machine(1, 0)), report)
    return Converted(str(target))


def trained(
    tree: Path,
    source: Path,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    ignored: Collection[str] = (),
    *,
    takes_mamba: bool = False,
) -> Trained:
    """Return the newest checkpoint of `source` and its facts; arguments as in `megatron_to_hf`.

    `takes_mamba` says that the caller supports models with Mamba layers.
    """
    run, source = run_of(source), checkpoints_of(source)
    if not (source / TRACKER).is_file():
        refuse_hf_folder(source, ConvertError)
    require_tracker(source, ConvertError, f"a run that saved, or a folder with {TRACKER}")
    args, is_hybrid = published_args(tree, source, ignored, takes_mamba=takes_mamba)
    shape, sequence = shape_of_args(args), context_of("The checkpoint", args)
    check_size("The checkpoint", shape)
    tokenizer, lacks = hf_tokenizer.choose(tokenizer, args, run)
    rows, note = vocab_size, ""
    if rows is None:
        rows, note = hf_tokenizer.rows(args, shape.vocab_size, tokenizer)
    shape = shape.model_copy(update={"vocab_size": rows})
    step = tracked(source)
    of_class = hf_tokenizer.class_note(tokenizer, family_of_shape(shape).tokenizer_class)
    notes = tuple(filter(None, (lacks, note, of_class)))
    training = model_card.Training(args, step, run)
    return Trained(source, training, shape, sequence, tokenizer, notes, is_hybrid)


def write_in_full(
    tree: Path, checkpoint: Trained, folder: Path, dtype: Dtype | None, report: Say
) -> None:
    """Write the weights, their config.json and the tokenizer into `folder`."""
    own = dtype_of_args(checkpoint.training.args)
    config = config_of(checkpoint.shape, dtype or own, checkpoint.sequence)
    write_configs(folder, config, checkpoint.tokenizer)
    flags = [*program_flags(checkpoint.shape, checkpoint.sequence), *DTYPES[own]]
    _run(tree, "to_hf", checkpoint.folder, folder, flags, report)


def write_configs(stage: Path, config: dict[str, Any], tokenizer: Path | None) -> None:
    """Write config.json and generation_config.json into `stage`, and copy the tokenizer there."""
    ids = hf_tokenizer.special_ids(tokenizer)
    hf_tokenizer.write_json(stage / "config.json", config | ids)
    if generation := hf_tokenizer.generation_config(tokenizer, ids):
        hf_tokenizer.write_json(stage / hf_tokenizer.GENERATION, generation)
    if tokenizer is not None:
        hf_tokenizer.copy(tokenizer, stage)


def program_flags(shape: Shape, sequence: int) -> list[str]:
    """Return the flags of the model on the CPU, without padding of its vocabulary."""
    vocabulary = ["--vocab-size", str(shape.vocab_size), "--make-vocab-size-divisible-by", "1"]
    return [*architecture_flags(shape, sequence), *platform_flags(Machine(1, 0)), *vocabulary]


def checkpoint_arguments(tree: Path, checkpoint: Path) -> dict[str, Any]:
    """Return the arguments in a checkpoint: of one iteration's folder, or of the newest."""
    return _facts(tree, checkpoint)["arguments"]


def published_args(
    tree: Path, checkpoint: Path, ignored: Collection[str] = (), *, takes_mamba: bool = False
) -> tuple[dict[str, Any], bool]:
    """Return the arguments in a checkpoint to publish, and whether it is a HybridModel's.

    Those of a HybridModel are returned as a GPT's, unless it has Mamba layers. `ignored` are
    unknown arguments that the user accepts. `takes_mamba` is as for `trained`.

    Raises:
        ConvertError: config.json cannot express the model that they describe.
    """
    facts = _facts(tree, checkpoint)
    args = facts["arguments"]
    pattern = given_pattern(args)
    if pattern is not None and FRESH in pattern and not takes_mamba:
        raise _has_mamba(checkpoint)
    if pattern is None or FRESH not in pattern:
        try:
            args = as_gpt(args)
        except ValueError as error:
            raise ConvertError(
                f"The model in {checkpoint} cannot be converted: {error}",
                expected="blocks of attention (* or +) and an MLP (-) or experts (E)",
            ) from error
    check_published(args, facts["parser"], ignored)
    return args, pattern is not None


def refuse_mamba(folder: Path) -> None:
    """Raise ConvertError if the Hugging Face folder has a model with Mamba layers."""
    if hf_tokenizer.read_json(folder / CONFIG).get("model_type") == NEMOTRON_H.model_type:
        raise _has_mamba(folder)


def _has_mamba(source: Path) -> ConvertError:
    return ConvertError(
        f"The model in {source} has Mamba layers, whose weights are neither packed nor quantized "
        "after training",
        expected="a model without them",
        help="`mqo convert` converts it in full precision",
    )


def _facts(tree: Path, checkpoint: Path) -> dict[str, Any]:
    request = {"checkpoint": checkpoint}
    facts: dict[str, Any] = call(tree / PROGRAM, "describe", request, **_OPTIONS)
    return facts


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a folder next to `target`, which is renamed to `target` on success."""
    target = target_of(target)
    if target.exists():
        raise ConvertError(f"{target} already exists", expected="a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{target.name}-", target.parent) as folder:
        stage = folder / target.name
        stage.mkdir()
        try:
            with full_disk_of(target.parent):
                yield stage
        except RunError as error:  # the program may not report that the disk was full
            if is_full(error) or shutil.disk_usage(folder).free < _NO_ROOM:
                raise DiskFullError(target.parent) from error
            raise
        readable = stage.stat().st_mode & 0o666
        for path in stage.rglob("*"):
            if path.is_file():
                path.chmod(readable)  # safetensors makes its files readable only by their owner
        stage.rename(target)


def _run(
    tree: Path, function: str, source: Path, target: Path, flags: list[str], report: Say
) -> None:
    """Call the program; ConvertError with its message if the files caused it, else RunError."""
    require("modelopt")  # which knows the names of the weights
    told: set[Advance] = set()

    def watch(advance: Advance) -> None:
        if advance not in told:
            told.add(advance)
            report(f"  {advance.done}/{advance.total}  {advance.what}")

    request = {"source": source, "target": target, "flags": flags}
    call(tree / PROGRAM, function, request, watch=watch, **_OPTIONS)
