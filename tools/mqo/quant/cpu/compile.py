"""Compiles the kernels, and keeps the machine code on disk for the next process."""

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
MOST_BYTES = 16 << 20  # of a kernel on disk; they have about 50 KB

Kernel = Callable[[int], None]


@functools.cache
def kernel(make: Callable[..., Kernel], *parameters: object) -> Kernel:
    """Compile what `make(*parameters)` returns; it holds no lock of Python's while it runs."""
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
    """Return where compiled kernels are kept, or None if nothing can be written.

    Numba would put them next to the source and know them by its path. But a run's source is a
    read-only copy at a path of its own, and would compile everything again. Here the folder is
    MQO_KERNEL_CACHE, else one in the user's cache, and the source's text is what counts. A flipped
    bit of machine code ends the process, so each file begins with the SHA-256 of the rest.
    """
    given = os.environ.get(CACHE_VARIABLE)
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = (Path(given) if given else Path(user, "mqo", "kernels")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder


@functools.cache
def _source_digest() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    versions = (sys.version, numba.__version__, llvmlite.__version__)
    return hashlib.sha256(text + repr(versions).encode()).hexdigest()


class _Cache:
    """The file of a kernel, instead of numba's cache. A kernel that cannot be read is compiled."""

    def __init__(self, *key: object) -> None:
        self._key = key

    def _path(self, signature: object, codegen: Any) -> Path:
        """Name the kernel, its source and the processor."""
        key = (_source_digest(), self._key, signature, codegen.magic_tuple())
        folder = cache_folder() or Path()
        return folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.kernel"

    def load_overload(self, signature: object, target: Any) -> object:
        target.refresh()
        try:
            content = _read(self._path(signature, target.codegen()))
            return content and CompileResult._rebuild(target, *pickle.loads(content))
        except Exception:  # damaged files fail in as many ways as unpickling does
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
    """Return what a file holds after its digest; None unless this user wrote it whole.

    It is code: that of another user counts as damaged. So do pipes, devices and huge files.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not own or status.st_size > MOST_BYTES:
            return None
        digest, content = file.read(32), file.read()
    return content if hashlib.sha256(content).digest() == digest else None
