"""Changes to a tree, all or none: a journal first, then the files, then the records.

A commit goes through these steps; a process killed between or inside any two leaves a tree that
`recover` brings to one of the two ends:

  stage    every new content is written below .mqo/incoming and synced: the tree is untouched
  journal  .mqo/journal.json appears, by a rename: from here on the change will be made
  files    each staged file is renamed to its place, or a file is deleted
  records  the same for what .mqo itself keeps: upstream.json, manifest.json, ...
  tidy     .mqo/incoming goes
  done     the journal goes

Before the journal a killed commit is rolled back (nothing happened); behind it, rolled forward.
Staged files lie in .mqo, so nothing stray is ever left beside a source file. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.errors import OverlayError

STORE, JOURNAL, INCOMING, COMMAND = ".mqo", "journal.json", "incoming", "command"
SCHEMA = 1
DEFAULT_MODE = 0o644


@dataclass(frozen=True)
class Change:
    """A file's new content, or None to delete it; `path` is relative to the tree.

    `mode` holds the permission bits; None keeps those of the file that is replaced.
    """

    path: str
    content: bytes | None
    mode: int | None = None


@dataclass(frozen=True)
class Recovered:
    """What `recover` did about a commit that was cut off: finished it, or undid its preparation."""

    finished: bool
    command: str
    files: int

    def __str__(self) -> str:
        what = f"'{self.command}'" if self.command else "a command"
        if self.finished:
            return f"{what} had been killed half-way; finished it first ({self.files} files)"
        return f"{what} had been killed before it changed anything; cleared away what it prepared"


def commit(
    root: Path,
    changes: Sequence[Change],
    records: Mapping[str, bytes | None],
    *,
    command: str,
) -> None:
    """Make all `changes` below `root`, and set (or, with None, delete) `records` in its .mqo.

    `command` is for whoever has to recover it. The caller holds the tree's lock. OverlayError, and
    no change, when a file must not be written, or the disk is full.
    """
    store = root / STORE
    for change in changes:
        check_writable(root, change.path)
    try:
        journal = _stage(root, changes, records, command)
        step("journal")
        _write_synced(store / JOURNAL, json.dumps(journal).encode())
        _sync_folder(store)
    except OSError as error:
        (store / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(store / INCOMING, ignore_errors=True)
        raise OverlayError(
            f"{root} could not be written ({error.strerror or error})",
            expected="a writable tree with room for a second copy of the changed files",
            help="Nothing was changed; make room, then repeat the command",
        ) from error
    _finish(root, journal)


def recover(root: Path) -> Recovered | None:
    """Bring a commit that was cut off to one of its two ends; None when there was none.

    The caller holds the tree's lock.
    """
    store = root / STORE
    if (store / JOURNAL).exists():
        journal = _read_journal(store / JOURNAL)
        _finish(root, journal)
        return Recovered(True, journal["command"], len(journal["files"]))
    if (store / INCOMING).exists():
        note = store / INCOMING / COMMAND
        command = note.read_text(encoding="utf-8") if note.exists() else ""
        shutil.rmtree(store / INCOMING)
        return Recovered(False, command, 0)
    return None


def is_interrupted(root: Path) -> bool:
    """Whether a commit was cut off, or is under way."""
    return (root / STORE / JOURNAL).exists() or (root / STORE / INCOMING).exists()


def check_writable(root: Path, path: str) -> None:
    """Refuse what a rename would do all the same: to read-only files, links, and through links."""
    file = root / path
    if file.is_symlink() or not file.parent.resolve().is_relative_to(root.resolve()):
        raise OverlayError(
            f"{file} is, or lies behind, a symbolic link; nothing was changed",
            expected="a file of this tree's own",
            help="Give the tree that the link leads to to --tree",
        )
    folder = file.parent
    while not folder.exists():
        folder = folder.parent
    for place in (file, folder) if file.exists() else (folder,):
        # The mode counts for root, too, whom the kernel would let through.
        if not place.stat().st_mode & 0o222 or not os.access(place, os.W_OK):
            raise OverlayError(
                f"{place} is read-only; nothing was changed",
                expected="a tree that may be written, which a run's own source is not",
                help="Change the tree that runs are made from, or see `ls -l`",
            )


def step(name: str) -> None:
    """Called before every step that could be the last one; tests stop the process here."""


def write_synced(path: Path, content: bytes, mode: int = DEFAULT_MODE) -> None:
    """Write one file of .mqo, whole or not at all, and only then return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_synced(path, content, mode)


def _stage(
    root: Path, changes: Sequence[Change], records: Mapping[str, bytes | None], command: str
) -> dict[str, Any]:
    incoming = root / STORE / INCOMING
    incoming.mkdir(parents=True)
    (incoming / COMMAND).write_text(command, encoding="utf-8")
    journal: dict[str, Any] = {"schema": SCHEMA, "command": command, "files": [], "records": []}
    for change in changes:
        mode = _mode(root / change.path) if change.mode is None else change.mode
        staged = _stage_one(incoming, f"f{len(journal['files'])}", change.content, mode)
        journal["files"].append({"path": change.path, "staged": staged})
    for name, content in records.items():
        staged = _stage_one(incoming, f"r{len(journal['records'])}", content, DEFAULT_MODE)
        journal["records"].append({"path": name, "staged": staged})
    _sync_folder(incoming)
    return journal


def _stage_one(incoming: Path, name: str, content: bytes | None, mode: int) -> str | None:
    if content is None:
        return None
    step("stage")
    _write_synced(incoming / name, content, mode)
    return name


def _finish(root: Path, journal: Mapping[str, Any]) -> None:
    """Every step may find itself done already, by the process that was killed."""
    store = root / STORE
    try:
        for kind, base in (("files", root), ("records", store)):
            for entry in journal[kind]:
                step(kind)
                _settle(store / INCOMING, entry["staged"], base / entry["path"])
            for folder in sorted({(base / entry["path"]).parent for entry in journal[kind]}):
                _prune(folder, base)
                if folder.exists():
                    _sync_folder(folder)
        step("tidy")
        shutil.rmtree(store / INCOMING, ignore_errors=True)
        step("done")
        (store / JOURNAL).unlink(missing_ok=True)
        _sync_folder(store)
    except OSError as error:
        raise OverlayError(
            f"'{journal['command']}' stopped half-way ({error})",
            expected="files that may be replaced",
            help="Mend that; the next command on this tree finishes the change first",
        ) from error


def _settle(incoming: Path, staged: str | None, target: Path) -> None:
    if staged is None:
        target.unlink(missing_ok=True)
    elif (incoming / staged).exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        (incoming / staged).replace(target)


def _prune(folder: Path, base: Path) -> None:
    """Remove folders that deletions left empty, but for the bytecode of what was deleted."""
    while folder != base and folder.is_dir():
        rest = [child for child in folder.iterdir() if child.name != "__pycache__"]
        if rest:
            return
        shutil.rmtree(folder)
        folder = folder.parent


def _read_journal(path: Path) -> dict[str, Any]:
    try:
        journal = json.loads(path.read_bytes())
        if journal["schema"] == SCHEMA:
            return journal
        found = f"{path} has schema {journal['schema']}, written by another version of mqo"
    except (ValueError, KeyError, TypeError) as error:
        found = f"{path} is damaged ({error})"
    raise OverlayError(
        found,
        expected=f"the journal of a command that was cut off, in schema {SCHEMA}",
        help="Use the version that wrote it; or delete the tree's megatron and .mqo folders and "
        "run `mqo vendor`",
    )


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777 if path.exists() else DEFAULT_MODE


def _write_synced(path: Path, content: bytes, mode: int = DEFAULT_MODE) -> None:
    """By way of a neighbour, so that `path` is whole or not there, also after a power cut."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    part.chmod(mode)
    part.replace(path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
