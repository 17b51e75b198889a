"""A Megatron tree on disk: upstream's files, mqo's records of them, and the files' states.

Two kinds of tree hold upstream: one that `vendor` filled, and a git work tree of Megatron-LM, where
HEAD has upstream's bytes. Everything that mqo stores is in TREE/.mqo, outside of the source
folders: records (see `records`), objects/ (contents by SHA-256), kept/ (copies of hand edits that
--force overwrote), and the journal of an unfinished change (see `transaction`).
"""

from __future__ import annotations

import ast
import datetime
import fcntl
import functools
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mqo.errors import OverlayError, VendorError
from mqo.overlay import checkout, literals, records, transaction, writable
from mqo.overlay.records import Manifest, Modified, PatchedFile, Upstream
from mqo.untrusted import Limit, NoFileError, UntrustedFileError, read_bytes, read_text

LOCK, HOLDER, IGNORE = writable.LOCK_FILES
# Commands that start together take turns: at a load of 38, 60 s were too few for 5 of 8 snapshots
# with 4 modifications. Waiting costs nothing; the user is told, and may stop with Ctrl-C.
LOCK_WAIT_S, LOCK_NOTE_S = 600, 15
LOCK_POLL_S = 0.05
PACKAGE_INFO = "megatron/core/package_info.py"
FileState = Literal["pristine", "patched", "edited", "missing"]
_log = logging.getLogger("mqo")


@dataclass(frozen=True)
class Tree:
    """A Megatron tree, by its root folder (the one that holds `megatron/`)."""

    root: Path

    @property
    def store(self) -> Path:
        """Return the folder of mqo's records of this tree."""
        return self.root / transaction.STORE

    # -- what is upstream's ------------------------------------------------------------------

    @property
    def is_vendored(self) -> bool:
        """Return whether `vendor` filled this tree."""
        return (self.store / records.UPSTREAM).exists()

    @property
    def is_checkout(self) -> bool:
        """Return whether this is a git work tree of Megatron-LM, pristine as in HEAD."""
        return not self.is_vendored and checkout.is_checkout(self.root)

    def upstream(self) -> Upstream:
        """Return the record of upstream's files; OverlayError if the tree holds no Megatron."""
        if self.is_checkout:
            return self._at_head
        upstream = records.read(self.store / records.UPSTREAM, lambda table: Upstream(**table))
        if upstream is None:
            raise OverlayError(
                f"{self.root} holds no vendored Megatron",
                expected="megatron/core and megatron/training from the pinned wheel, or a git work "
                "tree of Megatron-LM",
                help="Run `mqo vendor`",
            )
        return upstream

    def pristine(self, path: str) -> bytes:
        """Return upstream's bytes of a file, whatever the tree holds now."""
        if self.is_checkout:
            return self._head.contents[path]
        return self.object(self._vendored.files[path])

    def collides(self, path: str) -> bool:
        """Return whether upstream has a file where one would be added."""
        if self.is_checkout:
            return self._head.occupies(path)
        return path in self._vendored.files

    @functools.cached_property
    def _head(self) -> checkout.Commit:
        return checkout.read_commit(self.root)

    @functools.cached_property
    def _at_head(self) -> Upstream:
        files = {path: sha256(content) for path, content in self._head.contents.items()}
        origin = f"git {self._head.id[:12]}"
        return Upstream(version_of(self._head.contents, origin), origin, "", files)

    @functools.cached_property
    def _vendored(self) -> Upstream:
        return self.upstream()

    # -- what mqo did ------------------------------------------------------------------------

    def manifest(self) -> Manifest | None:
        """Return what is applied; None on a pristine tree."""
        return records.read(self.store / records.MANIFEST, Manifest.from_table)

    def patched(self) -> Manifest:
        """Return what is applied; OverlayError on an unpatched tree."""
        self.upstream()
        manifest = self.manifest()
        if manifest is None:
            raise OverlayError(
                f"{self.root} is not patched",
                expected="a tree with the patch series applied",
                help="Run `mqo apply`",
            )
        return manifest

    def modified(self) -> dict[str, Modified]:
        """Return the files whose quant types were set by hand, by path."""
        path = self.store / records.LITERALS
        rows = records.read(
            path,
            lambda table: {name: Modified(**row) for name, row in table["files"].items()},
            help=f"Delete {path}, to take the current files as the originals",
        )
        return rows or {}

    # -- contents ---------------------------------------------------------------------------

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a file of the tree; None if it does not exist."""
        try:
            return read_bytes(self.root / path, any_name=True)
        except NoFileError:
            return None
        except UntrustedFileError as error:
            raise OverlayError(
                error.found,
                expected=f"{error.expected}, which this user may read",
                help="Move it away, or correct its permissions (`ls -l` shows them)",
            ) from error

    def object(self, digest: str) -> bytes:
        """Return a stored object; OverlayError if it is missing or damaged."""
        content = self._stored(digest)
        if content is None:
            raise OverlayError(
                f"{self.store}/objects/{digest} is missing or damaged",
                expected="content with the SHA-256 that is its name",
                help=records.AGAIN,
            )
        return content

    def new_objects(self, contents: Iterable[bytes]) -> dict[str, bytes | None]:
        """Return the records to commit that store those of `contents` that are not stored yet."""
        wanted = {sha256(content): content for content in contents}
        return {f"objects/{d}": c for d, c in wanted.items() if self._stored(d) is None}

    def copies_of(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """Return the records that keep copies of files of the tree, as kept/TIME/PATH."""
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        contents = {path: self.read(path) for path in paths}
        return {f"kept/{stamp}/{path}": c for path, c in contents.items() if c is not None}

    def unused_objects(self, used: Collection[str]) -> dict[str, bytes | None]:
        """Return the records that delete every object that is not in `used` (SHA-256)."""
        folder = self.store / "objects"
        there = {path.name for path in folder.iterdir()} if folder.exists() else set()
        return {f"objects/{digest}": None for digest in there.difference(used)}

    def _stored(self, digest: str) -> bytes | None:
        path = self.store / "objects" / digest
        content = read_bytes(path, any_name=True) if path.exists() else None
        return content if content is not None and sha256(content) == digest else None

    def state_of(self, path: str, file: PatchedFile) -> FileState:
        """Return the state of a patched file; a changed quant type literal is not an edit."""
        content = self.read(path)
        if content is None:
            return "pristine" if file.pristine is None else "missing"
        digest = sha256(content)
        if digest == file.pristine:
            return "pristine"
        if digest == file.final or sha256(literals.neutral(content)) == file.final:
            return "patched"
        return "edited"

    def edited_files(self) -> list[str]:
        """Return the files that were changed or deleted by hand, sorted.

        In a git work tree only patched files count: its owner may change all others.
        """
        manifest = self.manifest()
        patched = manifest.files if manifest else {}
        edited = [p for p, f in patched.items() if self.state_of(p, f) in ("edited", "missing")]
        if not self.is_checkout:
            for path, digest in self.upstream().files.items():
                if path not in patched:
                    content = self.read(path)
                    if content is None or sha256(content) != digest:
                        edited.append(path)
        return sorted(edited)

    # -- one command at a time --------------------------------------------------------------

    def settle(self) -> None:
        """Finish or undo what a killed command left, for commands that only read."""
        if transaction.is_interrupted(self.root):
            with self.reading("look"):
                pass

    @contextmanager
    def reading(self, command: str) -> Iterator[None]:
        """Lock the tree like `locked`; allow other readers if the user may not write it.

        Raises:
            OverlayError: another command uses the tree; or it is read-only, and a killed command
            left it
                half-changed.
        """
        if os.access(self.store if self.store.exists() else self.root, os.W_OK):
            with self.locked(command):
                yield
            return
        with self.shared():
            if transaction.is_interrupted(self.root):
                raise OverlayError(
                    f"{self.root} was left half-changed by a killed command, and cannot be written",
                    expected="a whole tree",
                    help="Its owner's next `mqo status` repairs it",
                )
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Wait for a command that writes, and keep others from starting; write nothing.

        What a killed command left stays as it is.
        """
        with ExitStack() as stack:
            # Holding the lock file, if there is one, needs no write permission.
            if os.access(self.store / LOCK, os.R_OK):
                file = stack.enter_context((self.store / LOCK).open("rb"))
                self._wait(lambda: fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB))
            yield

    def _wait(self, take: Callable[[], Any]) -> None:
        """Call `take` until it succeeds or the time is up; tell the user once."""
        start, told = time.monotonic(), False
        while True:
            try:
                take()
                return
            except (BlockingIOError, TimeoutError):
                waited = time.monotonic() - start
            if waited >= LOCK_WAIT_S:
                raise OverlayError(
                    f"{self.root} is in use by {self._holder()}",
                    expected=f"the lock to be free within {LOCK_WAIT_S} s",
                    help="Wait for that command to end, then repeat this one",
                )
            if waited >= LOCK_NOTE_S and not told:
                _log.warning("waiting for %s, which uses %s", self._holder(), self.root)
                told = True
            time.sleep(LOCK_POLL_S)

    @contextmanager
    def locked(self, command: str) -> Iterator[None]:
        """Lock the tree for one command; after a short wait, print who uses it.

        An unfinished change of a killed command is completed or undone first.
        """
        from filelock import FileLock  # not in every Python that reads a tree

        lock = FileLock(self.store / LOCK)
        writable.check_store(self.root)
        with transaction.typed_errors(
            self.store, "a tree that may be written", "Nothing was changed"
        ):
            try:
                self.store.mkdir(exist_ok=True)
                self._wait(functools.partial(lock.acquire, timeout=0))
                (self.store / IGNORE).write_text("*\n")
                (self.store / HOLDER).write_text(f"process {os.getpid()} (mqo {command})")
            except OSError:
                lock.release()
                raise
        try:
            if recovered := transaction.recover(self.root):
                _log.warning("%s", recovered)
            yield
        finally:
            lock.release()

    def _holder(self) -> str:
        holder = self.store / HOLDER
        try:
            return read_text(holder, Limit.NAME) or "another process"
        except UntrustedFileError:
            return "another process"


def release_in(root: Path) -> str | None:
    """Return the release that the source at `root` states; None if there is none."""
    file = root / PACKAGE_INFO
    try:
        return version_of({PACKAGE_INFO: read_bytes(file)}, str(root))
    except (UntrustedFileError, VendorError):
        return None


def version_of(files: dict[str, bytes], origin: str) -> str:
    """Return MAJOR.MINOR.PATCH as megatron/core/package_info.py states it."""
    source = files.get(PACKAGE_INFO, b"")
    try:
        values = {
            node.targets[0].id: node.value.value
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and type(node.value.value) is int
        }
        return ".".join(str(values[part]) for part in ("MAJOR", "MINOR", "PATCH"))
    except (KeyError, SyntaxError, ValueError, RecursionError) as error:
        fault = f"states no {error}" if isinstance(error, KeyError) else f"is not Python ({error})"
        raise VendorError(
            f"{origin}: {PACKAGE_INFO} {fault}",
            expected="MAJOR, MINOR and PATCH, as in every release",
        ) from error


def running_python() -> str:
    """Return major and minor version, "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def sha256(content: bytes) -> str:
    """Return the hex digest."""
    return hashlib.sha256(content).hexdigest()
