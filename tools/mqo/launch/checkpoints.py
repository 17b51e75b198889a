"""List the checkpoints in a folder by the names of its files, and describe one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqo.errors import CheckpointError, MqoError
from mqo.megatron.run.files import MOST_DIGITS, RELEASE, TRACKER, iteration_folder, iteration_of
from mqo.program import call
from mqo.untrusted import Limit, check_file, list_folder, read_text, reading

EVALUATE = "tools/evaluate.py"


def newest(folder: Path) -> str | None:
    """Return the newest checkpoint, by the tracker file or else the folders, as a training does.

    None if the folder has none. Unlike in a training, a damaged checkpoint counts.
    """
    iteration = tracked(folder) if (folder / TRACKER).is_file() else ""
    if iteration == RELEASE or (iteration.isdecimal() and len(iteration) < MOST_DIGITS):
        return iteration
    return max(saved(folder), key=int, default=None)


def tracked(folder: Path) -> str:
    """Return the text of a folder's tracker file, unchecked."""
    return read_text(folder / TRACKER, Limit.NAME, errors="replace").strip()


def saved(folder: Path) -> list[str]:
    """Return the iterations in a folder that were saved completely, by their folders."""
    numbers = (iteration_of(path.parent) for path in folder.glob("iter_*/metadata.json"))
    return [str(number) for number in sorted(n for n in numbers if n is not None)]


def require_tracker(folder: Path, error: type[MqoError], expected: str, *, whose: str = "") -> None:
    """Raise `error` if a folder has no tracker file; the help says how to get one.

    Also raise it if a file of the newest checkpoint is a pipe or a device: the programs that read
    it would notice only after they have loaded torch.
    """
    if (folder / TRACKER).is_file():
        require_files(iteration_folder(folder, newest(folder) or RELEASE), error)
        return
    names = ([RELEASE] if (folder / RELEASE).is_dir() else []) + saved(folder)
    fault = f"There is no checkpoint{whose} in {folder}"
    help = "Give the run a CHECKPOINT, its first argument: `tiny` and `study` save only there"
    if names:
        listed = f"its checkpoints ({', '.join(names)})"
        fault = f"There is no {TRACKER} in {folder} to name the newest of {listed}"
        help = (
            f"If checkpoint {names[-1]} is complete, `echo {names[-1]} > {folder / TRACKER}` "
            "writes the file"
        )
    raise error(fault, expected=expected, help=help)


def require_files(iteration: Path, error: type[MqoError]) -> None:
    """Raise `error` if a file of an iteration's folder is a pipe, a device or a loop of links."""
    with reading(error):
        for path in list_folder(iteration) if iteration.is_dir() else ():
            if not path.is_dir():
                check_file(path)


def describe(tree: Path, folder: Path) -> dict[str, Any]:
    """Return how a checkpoint was quantized, as a program of a tree reads it, on the CPU.

    Raises:
        CheckpointError: it cannot be used.
        RunError: the program failed in another way.
    """
    options = {"variables": {"CUDA_VISIBLE_DEVICES": ""}, "error": CheckpointError}
    facts: dict[str, Any] = call(tree / EVALUATE, "describe", {"checkpoint": folder}, **options)
    return facts
