"""A Megatron tree on disk: upstream's files, what mqo knows about them, and the files' states.

Everything mqo keeps lies in TREE/.mqo, outside the source folders:
  upstream.json   what `vendor` put there: version, origin, the SHA-256 of every file
  manifest.json   what `apply` did: entries, and for each file its pristine and patched contents
  objects/        those contents, by SHA-256
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from mqo.errors import OverlayError
from mqo.overlay import literals
from mqo.overlay.transaction import recover

SCHEMA = 1
LOCK_WAIT_S = 20
RecordT = TypeVar("RecordT")
# "superseded": patched by an application that a later, unfinished one was to replace.
FileState = Literal["pristine", "patched", "superseded", "edited", "missing"]


@dataclass(frozen=True)
class Upstream:
    """What `vendor` materialised: release, where it came from, and {path: SHA-256}."""

    version: str
    origin: str
    python: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class PatchedFile:
    """A file's pristine content and, entry by entry, what it became: all as SHA-256 of objects.

    `earlier` is what it may hold besides, while one application replaces another.
    """

    pristine: str
    stages: tuple[tuple[str, str], ...]
    earlier: tuple[str, ...] = ()

    @property
    def final(self) -> str:
        """The content that the tree should hold (with every quant type literal at 'none')."""
        return self.stages[-1][1] if self.stages else self.pristine


@dataclass(frozen=True)
class AppliedEntry:
    """An entry as it was when it was applied."""

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
    def from_table(cls, table: dict) -> Manifest:
        """From what `asdict` made, by way of JSON."""
        files = {
            path: PatchedFile(
                row["pristine"],
                tuple((entry, digest) for entry, digest in row["stages"]),
                tuple(row.get("earlier", ())),
            )
            for path, row in table["files"].items()
        }
        return cls(table["version"], tuple(AppliedEntry(**e) for e in table["entries"]), files)

    def touched_by(self, entry: str) -> list[str]:
        """The files that `entry` changed, sorted."""
        return sorted(p for p, f in self.files.items() if entry in dict(f.stages))


@dataclass(frozen=True)
class Tree:
    """A Megatron tree, by its root folder (the one that holds `megatron/`)."""

    root: Path

    @property
    def store(self) -> Path:
        """Where mqo keeps what it knows of this tree."""
        return self.root / ".mqo"

    def upstream(self) -> Upstream:
        """The record of the last `vendor`; OverlayError when there is none."""
        upstream = self._read_record("upstream.json", lambda table: Upstream(**table))
        if upstream is None:
            raise OverlayError(
                f"{self.root} holds no vendored Megatron",
                expected="megatron/core and megatron/training from the pinned wheel",
                help="Run `mqo vendor`",
            )
        return upstream

    def manifest(self) -> Manifest | None:
        """What is applied; None on a pristine tree."""
        return self._read_record("manifest.json", Manifest.from_table)

    def patched(self) -> Manifest:
        """What is applied; OverlayError on an unpatched tree."""
        self.upstream()
        manifest = self.manifest()
        if manifest is None:
            raise OverlayError(
                f"{self.root} is not patched",
                expected="a tree with the patch series applied",
                help="Run `mqo apply`",
            )
        return manifest

    def write_upstream(self, upstream: Upstream) -> None:
        """Record what `vendor` put in place."""
        self._write_record("upstream.json", asdict(upstream))

    def write_manifest(self, manifest: Manifest) -> None:
        """Record what `apply` is about to do: written before the files, so that it can be finished
        or undone from any point.
        """
        self._write_record("manifest.json", asdict(manifest))

    def drop_manifest(self) -> None:
        """Forget the patches, once every file is pristine again."""
        (self.store / "manifest.json").unlink(missing_ok=True)

    def _read_record(self, name: str, build: Callable[[dict], RecordT]) -> RecordT | None:
        path = self.store / name
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            schema = table.pop("schema")
            if schema == SCHEMA:
                return build(table)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OverlayError(
                f"{path} is damaged ({error})",
                expected="the record that mqo wrote there",
                help="Run `mqo vendor --force`, which fetches the tree afresh",
            ) from error
        raise OverlayError(
            f"{path} has schema {schema}, written by another version of mqo",
            expected=f"schema {SCHEMA}",
            help="Use that version, or `mqo vendor --force`, which fetches the tree afresh",
        )

    def _write_record(self, name: str, table: dict) -> None:
        text = json.dumps({"schema": SCHEMA, **table}, indent=1)
        write_file(self.store / name, text.encode())

    # -- contents ---------------------------------------------------------------------------

    def read(self, path: str) -> bytes | None:
        """The bytes of a file of the tree; None when it is not there."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None

    def keep(self, content: bytes) -> str:
        """Store an object; its SHA-256."""
        digest = sha256(content)
        path = self.store / "objects" / digest
        if not path.exists():
            write_file(path, content)
        return digest

    def object(self, digest: str) -> bytes:
        """A stored object; OverlayError when it is missing or damaged."""
        path = self.store / "objects" / digest
        content = path.read_bytes() if path.exists() else b""
        if sha256(content) != digest:
            raise OverlayError(
                f"{path} is missing or damaged",
                expected="the content that its name is the SHA-256 of",
                help=f"Delete {self.store} and run `mqo vendor`, which fetches the tree afresh",
            )
        return content

    def state_of(self, path: str, file: PatchedFile) -> FileState:
        """The state of a patched file; a changed quant type literal is no edit."""
        content = self.read(path)
        if content is None:
            return "missing"
        if sha256(content) == file.pristine:
            return "pristine"
        digest = sha256(literals.neutral(content))
        if digest == file.final:
            return "patched"
        return "superseded" if digest in file.earlier else "edited"

    def edited_files(self) -> list[str]:
        """Files that are neither upstream's nor mqo's, sorted: changed or deleted by hand."""
        upstream, manifest = self.upstream(), self.manifest()
        patched = manifest.files if manifest else {}
        edited = [p for p, f in patched.items() if self.state_of(p, f) in ("edited", "missing")]
        for path, digest in upstream.files.items():
            if path not in patched:
                content = self.read(path)
                if content is None or sha256(content) != digest:
                    edited.append(path)
        return sorted(edited)

    @contextmanager
    def locked(self, command: str = "a command") -> Iterator[None]:
        """One command at a time on this tree; waits a little, then says who holds it.

        What an earlier command was cut off in is brought to an end first.
        """
        from filelock import FileLock, Timeout

        self.store.mkdir(parents=True, exist_ok=True)
        ignore = self.store / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
        holder = self.store / "lock.holder"
        lock = FileLock(self.store / "lock")
        try:
            lock.acquire(timeout=LOCK_WAIT_S)
        except Timeout:
            who = holder.read_text() if holder.exists() else "another process"
            raise OverlayError(
                f"{self.root} is in use by {who}",
                expected=f"the lock to be free within {LOCK_WAIT_S} s",
                help="Wait for that command to end, then repeat this one",
            ) from None
        try:
            holder.write_text(f"process {os.getpid()}")
            recovered = recover(self.root)
            if recovered:
                logging.getLogger("mqo").warning("%s", recovered)
            yield
        finally:
            lock.release()


def sha256(content: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(content).hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Write by way of a neighbouring file, so that `path` is never half-written; keeps its mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.mqo-part")
    with part.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    if path.exists():
        part.chmod(path.stat().st_mode)
    part.replace(path)
