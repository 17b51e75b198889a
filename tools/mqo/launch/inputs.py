"""Record a run's inputs before it starts, so that a rerun can compare them.

The inputs are the data, the tokenizer, and the checkpoint from which the run resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic.dataclasses import dataclass

from mqo.launch.checkpoints import newest
from mqo.launch.command import flag_words
from mqo.megatron.run.files import iteration_folder
from mqo.untrusted import sha256_of

# Larger files are compared by size and time: reading a whole corpus would delay every run.
HASHED = 64 << 20


@dataclass(frozen=True)
class Mark:
    """A file's identity: its size in bytes, and its SHA-256 or its modification time in ns."""

    size: int
    sha256: str | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True)
class Inputs:
    """{absolute path: mark} of the input files, and the iteration of the checkpoint.

    `iteration` is None for a run from scratch, and "release" for a release checkpoint.
    """

    files: Mapping[str, Mark]
    iteration: str | None = None

    @classmethod
    def read_by(cls, command: Sequence[str]) -> Inputs:
        """Return the inputs of a training command that is about to run."""
        # A blend may have weights between its prefixes; those are not files.
        given = flag_words(command)
        prefixes = given.get("--data-path", [])
        files = [Path(f"{word}.{end}") for word in prefixes for end in ("bin", "idx")]
        for flag in ("--tokenizer-model", "--pretrained-checkpoint", "--export-kd-cfg"):
            files += [path for word in given.get(flag, []) for path in _below(Path(word))]
        for word in given.get("--export-kd-teacher-load", []):
            files.append(Path(word) / "model_config.yaml")
            files += _below(iteration_folder(Path(word), newest(Path(word)) or ""))
        step = None
        for word in given.get("--load", [])[:1]:
            if step := newest(Path(word)):
                step = next(iter(given.get("--ckpt-step", [])), step)
                files += _below(iteration_folder(Path(word), step))
        return cls({str(path.absolute()): mark(path) for path in files if path.is_file()}, step)

    def changed(self) -> list[str]:
        """Return one clause per file that changed or is gone."""
        clauses = []
        for path, was in self.files.items():
            if not Path(path).is_file():
                clauses.append(f"{path} is gone")
            elif mark(Path(path)) != was:
                clauses.append(f"{path} has changed")
        return clauses


def mark(path: Path) -> Mark:
    """Return the mark of a file."""
    facts = path.stat()
    if facts.st_size > HASHED:
        return Mark(facts.st_size, mtime_ns=facts.st_mtime_ns)
    return Mark(facts.st_size, sha256=sha256_of(path))


def _below(path: Path) -> list[Path]:
    return sorted(path.rglob("*")) if path.is_dir() else [path]
