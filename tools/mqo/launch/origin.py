"""Distinguish the user's own runs from foreign ones, before a rerun executes their code.

A rerun executes the source in a run folder, and custom quantizers in plugins/, with the command
and the variables of its command.sh.
So each run folder gets a signature of these files. The key stays in the project's cache, where no
other user can read it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mqo.errors import RunError
from mqo.process import temporary_folder
from mqo.project import Project
from mqo.runs import RunFolder
from mqo.untrusted import Limit, read_bytes

_KEY_BYTES = 32
_BYTECODE = "__pycache__"  # a rerun does not copy it


def sign(project: Project, run: RunFolder) -> None:
    """Write the signature of a run that is about to start, if this user has a key."""
    with suppress(OSError):
        run.origin.write_text(_signature(run, _key(project)), encoding="ascii")


def is_own(project: Project, run: RunFolder) -> bool:
    """Return whether this user made the run here, and its code is unchanged."""
    try:
        was = read_bytes(run.origin, Limit.NAME)
        return hmac.compare_digest(was, _signature(run, _key(project)).encode("ascii"))
    except (OSError, ValueError):
        return False


def foreign(run: RunFolder) -> RunError:
    """Return the error for a run whose code may not be the user's own."""
    return RunError(
        f"{run.root} was not made here, or its code was changed since",
        expected="a run of this user and this project, because a rerun executes its source/, "
        "plugins/ and command.sh",
        help="Read them like any foreign program; `mqo rerun --trust` then runs them",
    )


def _signature(run: RunFolder, key: bytes) -> str:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for path in _files(run):
        content = hashlib.sha256(read_bytes(path)).digest()
        digest.update(path.relative_to(run.root).as_posix().encode() + b"\0" + content)
    return digest.hexdigest()


def _files(run: RunFolder) -> Iterator[Path]:
    """Yield the files that a rerun executes or reads options from; ValueError for a link."""
    below = [*run.source.rglob("*"), *run.plugins.rglob("*")]
    code = [path for path in below if _BYTECODE not in path.parts]
    for path in sorted([run.command, run.config, run.quant_config, run.source, run.plugins, *code]):
        if path.is_symlink():
            raise ValueError(f"{path} is a link")
        if path.is_file():
            yield path


def _key(project: Project) -> bytes:
    """Return this user's key, created if needed; OSError if that fails."""
    path = project.cache / f"runs-{os.getuid()}.key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(".key-", path.parent) as folder:  # readable by its owner only
            new = folder / path.name
            new.touch(mode=0o600)
            new.write_bytes(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):  # another command was faster
                path.hardlink_to(new)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged")
    return key
