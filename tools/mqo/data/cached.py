"""Keep prepared data in a folder: built once, complete or missing, and checked by its stamp."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel

from mqo.display import Say
from mqo.errors import DataError, full_disk_of
from mqo.untrusted import read_json_object, sha256_of

STAMP = "prepared.json"
Inputs = Mapping[str, object]  # what the files depend on


class BadRecords(BaseModel):
    """The records of a kind that were left out: how many, and the first one's file and line."""

    kind: str
    count: int
    file: str
    line: int


class Contents(BaseModel):
    """What a folder holds; `tokens` counts an end-of-document token per document."""

    documents: int
    tokens: int
    vocab_size: int
    bad: tuple[BadRecords, ...] = ()


def load(folder: Path, inputs: Inputs) -> Contents | None:
    """Return the contents of a folder if its stamp is for these inputs, and fits its files."""
    try:
        stamp = read_json_object(folder / STAMP)
        if stamp["inputs"] != inputs:
            return None
        # Only the stamped files: Megatron adds a cache of shuffles in the index's folder.
        if any(sha256_of(folder / name) != digest for name, digest in stamp["files"].items()):
            return None
        return Contents.model_validate({"vocab_size": inputs.get("vocab_size"), **stamp})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def ready(target: Path, inputs: Inputs, build: Callable[[Path], Contents], report: Say) -> Contents:
    """Return the contents of `target`; if they are not there, `build` writes them to a new folder.

    Several processes may call this (one works, the others wait), and it may be killed at any time:
    a folder counts only with a stamp that fits every file in it.
    """
    # A ready folder is always complete, so reading it needs neither a lock nor write access.
    if contents := load(target, inputs):
        return contents
    target.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_of(target.parent), _locked(target.with_name(f".{target.name}.lock"), report):
        contents = load(target, inputs)
        if contents is None:
            _build(target, inputs, build)
            contents = load(target, inputs)
    if contents is None:
        raise DataError(
            f"{target} changed while it was made",
            expected="files that only 'mqo' writes",
            help="Find out what else writes there, and run the command again",
        )
    return contents


@contextmanager
def _locked(path: Path, report: Say) -> Iterator[None]:
    # The system drops this lock with its process, so a killed one does not block others.
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        report("Another process is preparing this dataset; waiting for it")
        held = lock.acquire()
    with held:
        yield


def _build(target: Path, inputs: Inputs, build: Callable[[Path], Contents]) -> None:
    """Build next to the target and rename, so that the target is always complete or missing."""
    partial = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.old")
    for leftover in (partial, old):  # of a run that was killed; the lock keeps out living ones
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    contents = build(partial)
    stamp = {"inputs": inputs, **contents.model_dump(), "files": _fingerprints(partial)}
    (partial / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _fingerprints(folder: Path) -> dict[str, str]:
    """Return relative path -> SHA-256 of every file below `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): sha256_of(p) for p in files}
