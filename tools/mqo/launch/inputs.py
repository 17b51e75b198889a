"""What a run reads beside its source: recorded before it starts, so that a replay can tell.

Its data, its tokenizer, and the checkpoint that it goes on from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic.dataclasses import dataclass

from mqo.errors import MqoError

# Larger files are told by size and time: to read a whole corpus would hold up every run.
HASHED = 64 << 20
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Mark:
    """What tells whether a file is as it was: its SHA-256, or when it was last written, in ns."""

    size: int
    sha256: str | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True)
class Inputs:
    """{absolute path: mark} of the files that are read, and the iteration of the checkpoint.

    `iteration` is None for a run that begins anew; of a release checkpoint it is the text in its
    tracker.
    """

    files: Mapping[str, Mark]
    iteration: str | None = None

    @classmethod
    def of(cls, command: Sequence[str]) -> Inputs:
        """Return the inputs of a training command that is about to run."""
        # Between the prefixes of a blend may be weights, of which there are no files.
        prefixes = values(command, "--data-path")
        files = [Path(f"{word}.{end}") for word in prefixes for end in ("bin", "idx")]
        for flag in ("--tokenizer-model", "--pretrained-checkpoint", "--export-kd-cfg"):
            files += [path for word in values(command, flag) for path in _below(Path(word))]
        for word in values(command, "--export-kd-teacher-load"):
            files.append(Path(word) / "model_config.yaml")
            files += _below(checkpoint(Path(word), newest(Path(word)) or ""))
        step = None
        for word in values(command, "--load")[:1]:
            asked = values(command, "--ckpt-step")
            if step := newest(Path(word)):
                step = asked[0] if asked else step
                files += _below(checkpoint(Path(word), step))
        return cls({str(path.absolute()): mark(path) for path in files if path.is_file()}, step)

    def changed(self) -> list[str]:
        """What is not as it was, a clause a file."""
        found = []
        for path, was in self.files.items():
            if not Path(path).is_file():
                found.append(f"{path} is gone")
            elif mark(Path(path)) != was:
                found.append(f"{path} has changed")
        return found


def mark(path: Path) -> Mark:
    """The mark of a file."""
    facts = path.stat()
    if facts.st_size > HASHED:
        return Mark(facts.st_size, mtime_ns=facts.st_mtime_ns)
    with path.open("rb") as file:
        return Mark(facts.st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def values(command: Sequence[str], flag: str) -> list[str]:
    """What stands behind the last mention of `flag`, up to the next flag; upstream takes that."""
    if flag not in command:
        return []
    rest = list(command[len(command) - list(reversed(command)).index(flag) :])
    ends = [n for n, word in enumerate(rest) if word.startswith("--")]
    return rest[: ends[0]] if ends else rest


def without(command: Sequence[str], flag: str) -> list[str]:
    """The command without any mention of `flag` and its value."""
    kept = list(command)
    while flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


def newest(folder: Path) -> str | None:
    """The newest checkpoint that a training takes: the tracker's text, without one by the folders.

    None where there is none. A damaged one counts, which a training passes over.
    """
    if (folder / TRACKER).is_file():
        return (folder / TRACKER).read_text(encoding="utf-8").strip()
    return max(saved(folder), key=int, default=None)


def saved(folder: Path) -> list[str]:
    """The iterations in a folder that were saved to their end, by their folders."""
    ends = folder.glob("iter_*/metadata.json")
    names = (path.parent.name.removeprefix("iter_") for path in ends)
    return [str(number) for number in sorted(int(name) for name in names if name.isdecimal())]


def require_tracker(folder: Path, error: type[MqoError], expected: str, *, whose: str = "") -> None:
    """Raise `error` for a folder without a tracker, with what helps there."""
    if (folder / TRACKER).is_file():
        return
    found = (["release"] if (folder / "release").is_dir() else []) + saved(folder)
    what = f"There is no checkpoint{whose} in {folder}"
    help = "Give the run a CHECKPOINT (the first argument): `tiny` and `study` save only then"
    if found:
        listed = f"its checkpoints ({', '.join(found)})"
        what = f"There is no {TRACKER} in {folder}, to name the newest of {listed}"
        help = (
            f"Write it, if checkpoint {found[-1]} is whole: echo {found[-1]} > {folder / TRACKER}"
        )
    raise error(what, expected=expected, help=help)


def checkpoint(folder: Path, iteration: str) -> Path:
    """The folder of a checkpoint's iteration, as upstream names it."""
    return folder / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)


def _below(path: Path) -> list[Path]:
    return sorted(path.rglob("*")) if path.is_dir() else [path]
