"""The records that mqo keeps of a tree, written as JSON.

upstream.json   upstream's files: release, origin, and the SHA-256 of each
manifest.json   what `apply` did: entries, and for each file its pristine and patched contents
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mqo.errors import OverlayError
from mqo.untrusted import NoFileError, read_bytes

SCHEMA = 2
UPSTREAM, MANIFEST, LITERALS = "upstream.json", "manifest.json", "literals.json"
AGAIN = "Run `mqo vendor --force`, which fetches the tree again"
RecordT = TypeVar("RecordT")


@dataclass(frozen=True)
class Upstream:
    """Upstream's part of a tree: release, origin, and {path: SHA-256}.

    `python` is the version ("3.11") that the compiled parts are for; "" for a git work tree.
    """

    version: str
    origin: str
    python: str
    files: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Return the SHA-256 over all files, because HEAD of a git work tree may change."""
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()


@dataclass(frozen=True)
class PatchedFile:
    """A file's pristine content, and its content after each entry, as SHA-256 of objects.

    `pristine` is None for an added file, which upstream does not have. `mode` holds the permission
    bits it had when it was patched.
    """

    pristine: str | None
    stages: tuple[tuple[str, str], ...]
    mode: int

    @property
    def final(self) -> str:
        """Return the content that the tree should hold, with every literal at 'none'."""
        return self.stages[-1][1]


@dataclass(frozen=True)
class AppliedEntry:
    """An entry when it was applied; `digest` is of the entry and of upstream."""

    name: str
    kind: str
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What `apply` did to a tree."""

    version: str
    entries: tuple[AppliedEntry, ...]
    files: Mapping[str, PatchedFile]

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Manifest:
        """Read what `asdict` wrote to JSON; OverlayError for a tree of version 0.1."""
        files = {
            path: PatchedFile(
                row["pristine"],
                tuple((entry, digest) for entry, digest in row["stages"]),
                row["mode"],
            )
            for path, row in table["files"].items()
        }
        entries = tuple(AppliedEntry(**row) for row in table["entries"])
        if any(entry.kind == "sweep" for entry in entries):
            raise OverlayError(
                "Version 0.1 patched this tree: manifest.json has an entry of kind 'sweep'",
                expected="a tree that version 0.2 or later patched",
                help=f"`mqo restore` of version 0.1 (commit 0340fb9) undoes that. Or: {AGAIN}",
            )
        return cls(table["version"], entries, files)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the applied entries."""
        return tuple(entry.name for entry in self.entries)

    @property
    def objects(self) -> set[str]:
        """Return the SHA-256 of every content that the files' rows refer to."""
        digests = {digest for file in self.files.values() for _, digest in file.stages}
        return digests | {file.pristine for file in self.files.values() if file.pristine}

    def touched_by(self, entry: str) -> list[str]:
        """Return the files that `entry` changed, sorted."""
        return sorted(p for p, f in self.files.items() if entry in dict(f.stages))


@dataclass(frozen=True)
class Modified:
    """A file whose quant types were set: original and written SHA-256, and {site: value} in both.

    It is recorded while it differs from its bytes before the first modification.
    """

    original: str
    written: str
    was: Mapping[str, str]
    now: Mapping[str, str]


def modified_as_json(files: Mapping[str, Modified]) -> bytes | None:
    """Return the file content of the record; None, which deletes it, if nothing is modified."""
    rows = {path: asdict(row) for path, row in sorted(files.items())}
    return json.dumps({"schema": SCHEMA, "files": rows}, indent=1).encode() if rows else None


def as_json(record: Upstream | Manifest) -> bytes:
    """Return the file content of the record."""
    return json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1).encode()


def read(
    path: Path,
    build: Callable[[dict[str, Any]], RecordT],
    *,
    schema: int = SCHEMA,
    help: str = AGAIN,
    follow_link: bool = True,
) -> RecordT | None:
    """Read the record in a file; None without the file, OverlayError if it is damaged."""
    try:
        if path.exists() and not (path.is_file() and (follow_link or not path.is_symlink())):
            raise ValueError("it is not a plain file")
        table = json.loads(read_bytes(path))  # paths in it need not be UTF-8
        version = table.pop("schema")
        if version == schema:
            return build(table)
    except NoFileError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OverlayError(
            f"{path} is damaged ({error})", expected="the record that mqo wrote there", help=help
        ) from error
    raise OverlayError(
        f"{path} has schema {version}, written by another version of mqo",
        expected=f"schema {schema}",
        help=f"Use that version, or: {help}",
    )
