"""The notes to complete or undo an interrupted command, checked when they are read.

journal.json    the files that a commit is to move or delete
building.json   the folder outside of the tree that a command was making

Notes are not trusted, because a tree may come from elsewhere with its notes. They may only name
files of the tree, and unfinished folders as `start_building` names them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from mqo.overlay import records

STORE, JOURNAL, INCOMING, BUILDING = ".mqo", "journal.json", "incoming", "building.json"
SCHEMA = 1
_PART = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.mqo-part", re.DOTALL)
_STAGED = re.compile(r"[fr][0-9]{1,6}")
NoteT = TypeVar("NoteT")


@dataclass(frozen=True)
class Move:
    """A file to be put at `path`, from `staged` in .mqo/incoming; None deletes what is there."""

    path: str
    staged: str | None


@dataclass(frozen=True)
class Journal:
    """What a commit changes: `files` are relative to the tree, `records` to its .mqo."""

    command: str
    files: tuple[Move, ...]
    records: tuple[Move, ...]


@dataclass(frozen=True)
class Building:
    """A folder that becomes `target` when complete, and the parents made for it, inner first."""

    target: Path
    folder: Path
    made: tuple[Path, ...]


def start_building(target: Path) -> Building:
    """Name the unfinished folder for `target`, an absolute path.

    The name is unique: a command on another tree may be writing to the same target.
    """
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.mqo-part")
    return Building(target, folder, tuple(p for p in target.parents if not p.exists()))


def as_json(note: Journal | Building) -> bytes:
    """Return the content of the file for a note."""
    return json.dumps({"schema": SCHEMA, **asdict(note)}, default=str).encode()


def read_journal(path: Path, root: Path) -> Journal:
    """Read the journal of the tree at `root`.

    Raises:
        OverlayError: it is damaged, or names a path outside of the tree.
    """

    def build(table: dict[str, Any]) -> Journal:
        files, records = (_moves(table[kind]) for kind in ("files", "records"))
        for base, moves in ((root, files), (path.parent, records)):
            for move in moves:
                _require(is_contained(base, move.path), f"it names {move.path}")
                _require(
                    not (path.parent / INCOMING / (move.staged or "")).is_symlink(),
                    "a staged file is a link",
                )
        return Journal(_text(table["command"]), files, records)

    return _read(path, build)


def read_building(path: Path) -> Building:
    """Read the note of a folder that was being made.

    Raises:
        OverlayError: it is damaged, or names a folder that `start_building` does not name, that is
            a link, or that belongs to another user.
    """

    def build(table: dict[str, Any]) -> Building:
        note = Building(
            _absolute(table["target"]),
            _absolute(table["folder"]),
            tuple(_absolute(parent) for parent in table["made"]),
        )
        name = _PART.fullmatch(note.folder.name)
        is_beside = note.folder == note.target.with_name(note.folder.name)
        is_ours = is_beside and name is not None and name["name"] == note.target.name
        _require(
            is_ours and _is_own_folder(note.folder),
            f"it names {note.folder}",
        )
        for parent in note.made:
            _require(parent in note.target.parents, f"it names {parent}")
        return note

    return _read(path, build)


def is_contained(base: Path, path: str) -> bool:
    """Return whether `path` is below the folder `base`, and not through a link.

    Raises:
        OSError: a name on the way is too long, or a folder may not be searched.
    """
    inside = PurePosixPath(path)
    if inside.is_absolute() or not inside.parts or ".." in inside.parts or not _is_name(path):
        return False
    top = base.resolve()
    return not any((top / part).is_symlink() for part in (inside, *inside.parents))


def _read(path: Path, build: Callable[[dict[str, Any]], NoteT]) -> NoteT:
    store = path.parent.parent if path.parent.name == INCOMING else path.parent
    help = (
        f"Delete {JOURNAL} and {INCOMING}/ in {store}, and nothing else there, since it holds the "
        "originals; what that command had written then counts as changed by hand: `mqo diff` "
        "shows it, and `mqo restore --force` undoes it"
    )
    note = records.read(path, build, schema=SCHEMA, help=help, follow_link=False)
    assert note is not None, "the caller saw it"
    return note


def _moves(rows: Sequence[dict[str, Any]]) -> tuple[Move, ...]:
    moves = tuple(Move(_text(row["path"]), row["staged"]) for row in rows)
    for staged in (move.staged for move in moves if move.staged is not None):
        _require(_STAGED.fullmatch(_text(staged)) is not None, f"it names {staged}")
    return moves


def _text(value: object) -> str:
    _require(isinstance(value, str), f"{value!r} is not text")
    return str(value)


def _absolute(value: object) -> Path:
    path = Path(_text(value))
    _require(path.is_absolute() and ".." not in path.parts and _is_name(str(path)), f"{value!r}")
    return path


def _is_name(path: str) -> bool:
    """Return whether the system accepts such a path."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _is_own_folder(path: Path) -> bool:
    """Return whether the path does not exist, or is this user's folder and not a link."""
    try:
        facts = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
