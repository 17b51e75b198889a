"""Lists the checkpoints in a folder by the names of its files."""

from __future__ import annotations

from pathlib import Path

from mqo.errors import MqoError
from mqo.untrusted import Limit, check_file, list_folder, read_text, reading

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
MOST_DIGITS = 18  # of an iteration


def newest(folder: Path) -> str | None:
    """Return the newest checkpoint, by the tracker file or by the folders, as a training would.

    None if there is none. Unlike in a training, a damaged checkpoint counts.
    """
    found = tracked(folder) if (folder / TRACKER).is_file() else ""
    if found == RELEASE or (found.isdecimal() and len(found) < MOST_DIGITS):
        return found
    return max(saved(folder), key=int, default=None)


def tracked(folder: Path) -> str:
    """Return what the tracker of a folder says, whatever that is."""
    return read_text(folder / TRACKER, Limit.NAME, errors="replace").strip()


def saved(folder: Path) -> list[str]:
    """Return the iterations in a folder that were saved to their end, by their folders."""
    ends = folder.glob("iter_*/metadata.json")
    names = (path.parent.name.removeprefix("iter_") for path in ends)
    return [str(number) for number in sorted(int(name) for name in names if name.isdecimal())]


def require_tracker(folder: Path, error: type[MqoError], expected: str, *, whose: str = "") -> None:
    """Raise `error` for a folder without a tracker, with what helps there.

    So does a file of the newest checkpoint that is a pipe or a device: the programs that read it
    find that only after they have loaded torch.
    """
    if (folder / TRACKER).is_file():
        require_files(checkpoint(folder, newest(folder) or RELEASE), error)
        return
    found = ([RELEASE] if (folder / RELEASE).is_dir() else []) + saved(folder)
    what = f"There is no checkpoint{whose} in {folder}"
    help = "Give the run a CHECKPOINT (the first argument): `tiny` and `study` save only then"
    if found:
        listed = f"its checkpoints ({', '.join(found)})"
        what = f"There is no {TRACKER} in {folder}, to name the newest of {listed}"
        help = (
            f"Write it, if checkpoint {found[-1]} is whole: echo {found[-1]} > {folder / TRACKER}"
        )
    raise error(what, expected=expected, help=help)


def require_files(iteration: Path, error: type[MqoError]) -> None:
    """Raise `error` if a file of an iteration's folder is a pipe, a device or a circle of links."""
    with reading(error):
        for path in list_folder(iteration) if iteration.is_dir() else ():
            if not path.is_dir():
                check_file(path)


def checkpoint(folder: Path, iteration: str) -> Path:
    """Return the folder of a checkpoint's iteration, as upstream names it."""
    return folder / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)
