"""Change all files of a tree or none: write a journal first, then the files, then the records.

A commit goes through these steps. If the process is killed between or inside any of them, `recover`
brings the tree to one of the two ends:

  stage    every new content is written below .mqo/incoming and synced: the tree is untouched
  journal  .mqo/journal.json appears, by a rename: from here on the change is certain
  files    each staged file is renamed to its place, or a file is deleted
  records  the same for the content of .mqo: upstream.json, manifest.json, objects/, kept/
  tidy     .mqo/incoming is removed
  done     the journal is removed

A commit killed before the journal is rolled back (nothing happened); after it, rolled forward.
Staged files are in .mqo, so nothing stray is ever left next to a source file.

`building` does the same for a new folder outside of the tree: a note in .mqo/incoming names the
unfinished one, which `recover` removes. `journal` reads and writes the notes. Standard library
only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mqo.errors import OverlayError, full_disk_of
from mqo.output import target_of
from mqo.overlay import journal as notes
from mqo.overlay import writable
from mqo.overlay.journal import BUILDING, INCOMING, JOURNAL, STORE, Building, Journal, Move
from mqo.overlay.writable import check_writable

COMMAND = "command"
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
    """What `recover` did with an interrupted command: it finished it, or undid its preparation.

    `result` is what was finished: "3 files", or a folder. `command` is empty if the command was
    killed before it wrote its name, or while it cleaned up at its end.
    """

    finished: bool
    command: str
    result: str = ""

    def __str__(self) -> str:
        who = f"'{self.command}'" if self.command else "a command"
        if self.finished:
            return f"{who} was killed half-way; finished it first ({self.result})"
        if not self.command:
            return "a command was killed; removed what it left"
        return f"{who} was killed before it changed anything; removed what it prepared"


def check(root: Path, changes: Sequence[Change], records: Mapping[str, bytes | None]) -> None:
    """Raise OverlayError for changes and records that `commit` would refuse; write nothing."""
    writable.check_store(root)
    writable.refuse_clash(change.path for change in changes if change.content is not None)
    for change in changes:
        check_writable(root, change.path)
    writable.check_records(root, records)


def commit(
    root: Path, changes: Sequence[Change], records: Mapping[str, bytes | None], *, command: str
) -> None:
    """Make all `changes` below `root`, and set (or, with None, delete) `records` in its .mqo.

    `command` is named when the change is recovered. The caller holds the tree's lock. DiskFullError
    or OverlayError, without any change, if the disk is full or a file must not be written.
    """
    store = root / STORE
    expected = "a writable tree with room for a second copy of the changed files"
    with typed_errors(root, expected, "Correct that, then repeat the command; nothing was changed"):
        try:
            check(root, changes, records)
            journal = _stage(root, changes, records, command)
            step("journal")
            (store / INCOMING / JOURNAL).replace(store / JOURNAL)
            _sync(store)
        except OSError:
            (store / JOURNAL).unlink(missing_ok=True)
            shutil.rmtree(store / INCOMING, ignore_errors=True)
            raise
    _finish(root, journal)


@contextmanager
def typed_errors(target: Path, expected: str, help: str) -> Iterator[None]:
    """Raise DiskFullError or OverlayError for a system error in writing at `target`."""
    try:
        with full_disk_of(target):
            yield
    except OSError as error:
        raise OverlayError(
            f"{target} could not be written ({_reason(error)})", expected=expected, help=help
        ) from error


@contextmanager
def building(root: Path, target: Path, *, command: str) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `target` if the block succeeds and is removed if not.

    The caller holds the lock of the tree at `root`. If that tree is read-only, no note is made, and
    a kill leaves the unfinished folder. Nothing is synced, since the folder can be made again after
    a power cut. OverlayError if `target` exists or cannot be written, DiskFullError if its disk or
    that of the tree is full.
    """
    target = target_of(target)
    if target.exists():
        raise OverlayError(f"{target} exists", expected="a path that does not exist")
    incoming, note = root / STORE / INCOMING, notes.start_building(target.resolve())
    target, folder = note.target, note.folder
    is_noted = os.access(incoming.parent, os.W_OK)
    expected = "a folder that can be made, with room for the files"
    with typed_errors(target, expected, "No partial output was left"):
        try:
            if is_noted:
                with full_disk_of(root):
                    _note_building(incoming, command, note)
            step("building")
            folder.mkdir(parents=True)
            yield folder
            step("built")
            folder.rename(target)
        finally:
            _settle_building(note)
            if is_noted:
                _clear(incoming)


def _note_building(incoming: Path, command: str, note: Building) -> None:
    _open_incoming(incoming.parent.parent, command)
    write_synced(incoming / BUILDING, notes.as_json(note))
    _sync(incoming)
    _sync(incoming.parent)


def recover(root: Path) -> Recovered | None:
    """Finish or undo an interrupted command; None if there was none.

    The caller holds the tree's lock. OverlayError if that fails, or a note is invalid.
    """
    store = root / STORE
    writable.check_store(root)
    if (store / JOURNAL).exists():
        journal = notes.read_journal(store / JOURNAL, root)
        _finish(root, journal)
        return Recovered(True, journal.command, f"{len(journal.files)} files")
    if not (store / INCOMING).exists():
        return None
    try:
        return _recover_incoming(store / INCOMING)
    except OSError as error:
        raise OverlayError(
            f"What a killed command left cannot be removed ({error})",
            expected="folders that may be removed",
            help="Correct that, then repeat the command",
        ) from error


def is_interrupted(root: Path) -> bool:
    """Return whether a command was interrupted, or, without the tree's lock, is running."""
    return any((root / STORE / name).exists() for name in (JOURNAL, INCOMING))


def remove_tree(folder: Path) -> None:
    """Remove a folder, if it exists, with all its content, also read-only folders."""
    if folder.exists():
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


def step(name: str) -> None:
    """Do nothing before every step that could be the last one; tests kill the process here."""


def write_synced(path: Path, content: bytes) -> None:
    """Write one file of .mqo, completely or not at all, and sync it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    _write(part, content)
    _sync(part)
    part.replace(path)


def _open_incoming(root: Path, command: str) -> None:
    incoming = root / STORE / INCOMING
    incoming.mkdir(parents=True)
    (incoming / COMMAND).write_text(command, encoding="utf-8")


def _stage(
    root: Path, changes: Sequence[Change], records: Mapping[str, bytes | None], command: str
) -> Journal:
    incoming = root / STORE / INCOMING
    _open_incoming(root, command)
    files, kept = [], []
    for n, change in enumerate(changes):
        mode = mode_of(root / change.path) if change.mode is None else change.mode
        files.append(Move(change.path, _stage_one(incoming, f"f{n}", change.content, mode)))
    for n, (name, content) in enumerate(records.items()):
        kept.append(Move(name, _stage_one(incoming, f"r{n}", content, DEFAULT_MODE)))
    journal = Journal(command, tuple(files), tuple(kept))
    _write(incoming / JOURNAL, notes.as_json(journal))
    _sync_tree(incoming)
    return journal


def _stage_one(incoming: Path, name: str, content: bytes | None, mode: int) -> str | None:
    if content is None:
        return None
    step("stage")
    _write(incoming / name, content, mode)
    return name


def _finish(root: Path, journal: Journal) -> None:
    """Make the change; the killed process may have done any of its steps."""
    store = root / STORE
    try:
        if (store / INCOMING).exists():  # otherwise all is done, and later changes are possible
            _settle_all("files", root, store / INCOMING, journal.files)
            _settle_all("records", store, store / INCOMING, journal.records)
        step("tidy")
        remove_tree(store / INCOMING)
        step("done")
        (store / JOURNAL).unlink(missing_ok=True)
        _sync(store)
    except OSError as error:
        raise OverlayError(
            f"'{journal.command}' stopped half-way ({error})",
            expected="files that may be replaced",
            help="Correct that; the next command on this tree finishes the change first",
        ) from error


def _settle_all(kind: str, base: Path, incoming: Path, moves: Sequence[Move]) -> None:
    for move in moves:
        step(kind)
        target = base / move.path
        if move.staged is None:
            target.unlink(missing_ok=True)
        elif (incoming / move.staged).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            (incoming / move.staged).replace(target)
    folders = {base / parent for move in moves for parent in PurePosixPath(move.path).parents}
    for folder in sorted(folders, reverse=True):  # inner ones first
        _sync_or_prune(folder, base)


def _sync_or_prune(folder: Path, base: Path) -> None:
    """Remove the folder if deletions left nothing in it but the bytecode of deleted files."""
    if not folder.is_dir():
        return
    if folder != base and all(child.name == "__pycache__" for child in folder.iterdir()):
        remove_tree(folder)
    else:
        _sync(folder)


def _clear(incoming: Path) -> None:
    """Remove the name first: a command killed here must not count as one without changes."""
    (incoming / COMMAND).unlink(missing_ok=True)
    remove_tree(incoming)


def _recover_incoming(incoming: Path) -> Recovered:
    note = incoming / COMMAND
    command = note.read_text(encoding="utf-8", errors="replace") if note.exists() else ""
    outcome = Recovered(False, command)
    if (incoming / BUILDING).exists():
        build = notes.read_building(incoming / BUILDING)
        if _settle_building(build):
            outcome = Recovered(True, command, str(build.target))
    _clear(incoming)
    return outcome


def _settle_building(note: Building) -> bool:
    """Return whether the folder became the target; else remove it and its new parents."""
    if note.target.exists() and not note.folder.exists():
        return True
    remove_tree(note.folder)
    for parent in note.made:  # inner ones first
        if parent.is_dir() and not parent.is_symlink() and not any(parent.iterdir()):
            parent.rmdir()
    return False


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error):  # a list of (source, target, reason)
        return str(error.args[0][0][2]) if error.args and error.args[0] else "copying failed"
    return error.strerror or str(error)


def mode_of(path: Path) -> int:
    """Return the permission bits of a file, or those that a new one gets."""
    return path.stat().st_mode & 0o7777 if path.exists() else DEFAULT_MODE


def _write(path: Path, content: bytes, mode: int = DEFAULT_MODE) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def _sync_tree(folder: Path) -> None:
    """Sync in threads: a file system combines syncs that run together."""
    from concurrent.futures import ThreadPoolExecutor  # takes time to load

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(_sync, [*folder.rglob("*"), folder]))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
