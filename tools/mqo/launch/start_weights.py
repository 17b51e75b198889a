"""Start a training from the weights in a Hugging Face folder (`--from FOLDER`)."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from mqo.display import Say
from mqo.errors import MissingError, MqoError
from mqo.launch.command import flag_words
from mqo.launch.convert import hf_to_megatron
from mqo.launch.hf_source import CONFIG, check_hf_folder
from mqo.megatron.run.files import TRACKER
from mqo.project import Project
from mqo.untrusted import sha256_of

if TYPE_CHECKING:
    from mqo.launch.config import Experiment

FLAG = "--pretrained-checkpoint"  # Megatron then starts at step 0, without an optimizer's state
_TOKENIZER = "tokenizer.json"
_WHOLE = "1,1"  # of --shrink
_VERSION = 1  # of the conversion; increase it if a change of the program changes its output


def fill_in(args: argparse.Namespace, extra: Sequence[str], project: Project) -> list[str]:
    """Add the model and the tokenizer that `--from` implies; return Megatron's flags with FLAG.

    Nothing is converted.

    Raises:
        MqoError: another option contradicts the folder, or it has no tokenizer.
        ConvertError: the folder holds no weights.
    """
    folder = args.start = args.start.expanduser().absolute()
    if not folder.is_dir():
        raise MissingError(f"The folder {folder} does not exist", expected="one with a config.json")
    check_hf_folder(folder)
    if args.model is not None and Path(args.model).expanduser().absolute() != folder:
        raise MqoError(
            f"--from {folder} was given with --model {args.model}",
            expected="--from without --model: the folder describes its model",
        )
    if args.shrink not in (None, _WHOLE):
        raise MqoError("--from was given with --shrink", expected="the size of the weights")
    if FLAG in flag_words(extra):
        raise MqoError(f"--from was given with {FLAG} after `--`", expected="one of them")
    args.model, args.shrink = str(folder), _WHOLE
    if args.tokenizer is None and args.tokenizer_option is None:
        if not (folder / _TOKENIZER).is_file():
            raise MqoError(
                f"{folder} has no {_TOKENIZER}",
                expected="--tokenizer FOLDER, the tokenizer that the weights were trained with",
            )
        args.tokenizer_option = folder
    return [*extra, FLAG, str(checkpoint_of(project, folder))]


def check_data(args: argparse.Namespace) -> None:
    """Raise MqoError for `--from` without data: a sample has another tokenizer."""
    if args.start is not None and not (args.text or args.data_option or args.data_prefix):
        raise MqoError(
            "--from was given without data; a sample has another tokenizer",
            expected="--text FILE, or --data PREFIX with an index of the folder's tokenizer",
        )


def checkpoint_of(project: Project, folder: Path) -> Path:
    """Return the folder of the checkpoint with the weights of `folder`, which may not exist yet."""
    files = [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]
    words = [str(_VERSION), *map(sha256_of, files)]
    key = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
    return project.own_data / "weights" / f"{folder.name}-{key}"


def ready_weights(experiment: Experiment, tree: Path, report: Say) -> None:
    """Convert the weights that a run starts from, unless that was done; of two processes one works.

    Does nothing for a run without such weights. If the folder in which the run saves holds a
    checkpoint, the run continues from that.
    """
    folder, saves = experiment.start, experiment.checkpoint
    if folder is None:
        return
    if saves is not None and (saves / TRACKER).is_file():
        report(f"note     : the weights of {folder} are not read, since {saves} has a checkpoint")
        return
    target = Path(flag_words(experiment.extra_flags)[FLAG][0])  # as `fill_in` chose it
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not target.exists():
            report(f"weights  : converting {folder}")
            for note in hf_to_megatron(tree, folder, target, report).notes:
                report(f"note     : {note}")
    report(f"weights  : {folder}, as {target}")
