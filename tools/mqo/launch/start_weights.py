"""Start a training from the weights in a Hugging Face folder, as `--from FOLDER` asks for."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from mqo.display import Say
from mqo.errors import MqoError
from mqo.launch.command import flag_words
from mqo.launch.convert import hf_to_megatron
from mqo.launch.hf_source import CONFIG, check_hf_folder
from mqo.launch.prepare import ready_tree
from mqo.overlay.series import Series
from mqo.project import Project
from mqo.untrusted import sha256_of

FLAG = "--pretrained-checkpoint"  # Megatron then starts at step 0, without an optimizer's state
_TOKENIZER = "tokenizer.json"
_WHOLE = "1,1"  # of --shrink


def fill_in(args: argparse.Namespace, extra: Sequence[str], project: Project) -> list[str]:
    """Add the model, the tokenizer and the flag that `--from` implies; return Megatron's flags.

    Nothing is converted.

    Raises:
        MqoError: another option contradicts the folder, or there is no data.
        ConvertError: the folder holds no weights.
    """
    folder = args.start.expanduser().absolute()
    check_hf_folder(folder)
    if args.model is not None and Path(args.model).expanduser().absolute() != folder:
        raise MqoError(
            f"--from {args.start} was given with --model {args.model}",
            expected="--from without --model: the folder describes its model",
        )
    if args.shrink not in (None, _WHOLE):
        raise MqoError("--from was given with --shrink", expected="the size of the weights")
    if FLAG in flag_words(extra):
        raise MqoError(f"--from was given with {FLAG} after `--`", expected="one of them")
    if not (args.text or args.data_option or args.data_prefix):
        raise MqoError(
            "--from was given without data; a sample has another tokenizer",
            expected="--text FILE, or --data PREFIX with an index of the folder's tokenizer",
        )
    args.model, args.shrink = str(folder), _WHOLE
    if args.tokenizer is None and args.tokenizer_option is None and (folder / _TOKENIZER).is_file():
        args.tokenizer_option = folder
    return [*extra, FLAG, str(checkpoint_of(project, folder))]


def checkpoint_of(project: Project, folder: Path) -> Path:
    """Return the folder of the checkpoint with the weights of `folder`, which may not exist yet."""
    files = [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]
    digests = " ".join(sha256_of(file) for file in files)
    key = hashlib.sha256(digests.encode()).hexdigest()[:16]
    return project.own_data / "weights" / f"{folder.name}-{key}"


def ready_weights(project: Project, folder: Path, report: Say) -> None:
    """Convert the weights of `folder`, unless they are; of two processes one works."""
    folder = folder.expanduser().absolute()
    target = checkpoint_of(project, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not target.exists():
            tree = ready_tree(project, Series.of_project(project), report, allow_edits=True)
            hf_to_megatron(tree.root, folder, target, report)
    report(f"weights  : {folder}, converted in {target}")
