"""Compile the kernels, and cache the machine code on disk for the next process."""

import ctypes
import functools
import hashlib
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core import serialize
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult

CACHE_VARIABLE = "MQO_KERNEL_CACHE"
MOST_BYTES = 16 << 20  # limit for a kernel on disk; kernels have about 50 KB

Kernel = Callable[[int], None]


@functools.cache
def kernel(make: Callable[..., Kernel], *parameters: object) -> Kernel:
    """Compile the function that `make(*parameters)` returns; it runs without Python's lock."""
    function = make(*parameters)
    compiled = CFunc(function, ((types.int64,), types.void), {}, {"error_model": "numpy"})
    if cache_folder() is not None:
        compiled._cache = _Cache(f"{make.__module__}.{make.__qualname__}", parameters)
    compiled.compile()
    pointer = ctypes.CFUNCTYPE(None, ctypes.c_int64)(compiled.address)
    pointer.owner = compiled  # type: ignore[attr-defined]  # its code lives as long
    return pointer


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, or None if it cannot be written.

    Numba's cache is next to the source and depends on its path. But the source of a run is a
    read-only copy at a new path, and would be compiled again. Here the folder is MQO_KERNEL_CACHE,
    or one in the user's cache, and files depend on the text of the source. A flipped bit of machine
    code crashes the process, so each file begins with the SHA-256 of the rest.
    """
    given = os.environ.get(CACHE_VARIABLE)
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = (Path(given) if given else Path(user, "mqo", "kernels")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None
    return folder


@functools.cache
def _source_digest() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    versions = (sys.version, numba.__version__, llvmlite.__version__)
    return hashlib.sha256(text + repr(versions).encode()).hexdigest()


class _Cache:
    """The file of a kernel, instead of numba's cache. An unreadable kernel is compiled again."""

    def __init__(self, *key: object) -> None:
        self._key = key

    def _path(self, signature: object, codegen: Any) -> Path:
        """Return the path for this kernel, source and processor."""
        key = (_source_digest(), self._key, signature, codegen.magic_tuple())
        folder = cache_folder() or Path()
        return folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.kernel"

    def load_overload(self, signature: object, target: Any) -> object:
        target.refresh()
        try:
            content = _read(self._path(signature, target.codegen()))
            return content and CompileResult._rebuild(target, *pickle.loads(content))
        except Exception:  # unpickling a damaged file can raise anything
            return None

    def save_overload(self, signature: object, data: Any) -> None:
        if data.library.has_dynamic_globals:  # addresses of this process
            return
        path = self._path(signature, data.codegen)
        content = serialize.dumps(data._reduce())
        with suppress(OSError):
            handle, name = tempfile.mkstemp(dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                Path(name).replace(path)
            except OSError:
                Path(name).unlink()


def _read(path: Path) -> bytes | None:
    """Return the content of a file after its digest; None unless this user wrote all of it.

    It is code, so files of other users count as damaged, and so do pipes, devices and huge files.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not own or status.st_size > MOST_BYTES:
            return None
        digest, content = file.read(32), file.read()
    return content if hashlib.sha256(content).digest() == digest else None
