"""What a run reads beside its source: recorded before it starts, so that a replay can tell.

Its data, its tokenizer, and the checkpoint that it goes on from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        """Of a training command that is about to run."""
        files = [*_data_files(command)]
        for flag in ("--tokenizer-model", "--pretrained-checkpoint", "--export-kd-cfg"):
            files += [path for word in values(command, flag) for path in _below(Path(word))]
        for word in values(command, "--export-kd-teacher-load"):
            newest = (Path(word) / TRACKER).read_text(encoding="utf-8").strip()
            files += [Path(word) / "model_config.yaml", *_below(checkpoint(Path(word), newest))]
        step = None
        for word in values(command, "--load")[:1]:
            tracker = Path(word) / TRACKER
            if tracker.is_file():
                asked = values(command, "--ckpt-step")
                step = asked[0] if asked else tracker.read_text(encoding="utf-8").strip()
                files += _below(checkpoint(Path(word), step))
        return cls({str(path.absolute()): mark(path) for path in files if path.is_file()}, step)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Inputs:
        """What `as_table` gave."""
        files = {path: Mark(**fields) for path, fields in table["files"].items()}
        return cls(files, table["iteration"])

    def as_table(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

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


def checkpoint(folder: Path, iteration: str) -> Path:
    """The folder of a checkpoint's iteration, as upstream names it."""
    return folder / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)


def _data_files(command: Sequence[str]) -> Iterable[Path]:
    """The pairs of all prefixes of `--data-path`, between which the weights of a blend may be."""
    for word in values(command, "--data-path"):
        yield from (Path(f"{word}.{ending}") for ending in ("bin", "idx"))


def _below(path: Path) -> list[Path]:
    return sorted(path.rglob("*")) if path.is_dir() else [path]
