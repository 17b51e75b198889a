"""Compiles the kernels, and keeps the machine code on disk for the next process."""

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc

CACHE_VARIABLE = "MQO_KERNEL_CACHE"

Kernel = Callable[[int], None]


@functools.cache
def kernel(make: Callable[..., Kernel], *parameters: object) -> Kernel:
    """Compile what `make(*parameters)` returns; it holds no lock of Python's while it runs."""
    function = make(*parameters)
    compiled = CFunc(function, ((types.int64,), types.void), {}, {"error_model": "numpy"})
    if cache_folder() is not None:
        compiled._cache = _Cache(function, make.__name__, parameters)
    compiled.compile()
    pointer = ctypes.CFUNCTYPE(None, ctypes.c_int64)(compiled.address)
    pointer.owner = compiled  # type: ignore[attr-defined]  # its code lives as long
    return pointer


@functools.cache
def cache_folder() -> Path | None:
    """Return where compiled kernels are kept, or None where nothing can be written.

    Numba would put them beside the source and know them by its path; but a run's source is a
    read-only copy at a path of its own, and would compile everything again. Here the folder is
    MQO_KERNEL_CACHE, else one in the user's cache, and the source's text is what counts.
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
    text = b"".join(file.read_bytes() for file in files) + llvmlite.__version__.encode()
    return hashlib.sha256(text).hexdigest()


class _Locator:
    """Tells numba's cache where to look; it adds the processor and its own version to the key."""

    def __init__(self, function: Callable, path: str) -> None:
        # numba's own warnings read these.
        self._py_file, self._lineno = path, function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable, path: str) -> "_Locator":
        return cls(function, path)

    def ensure_cache_path(self) -> None:
        pass

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return _source_digest()

    def get_disambiguator(self) -> str:
        return _source_digest()[:16]


class _Implementation(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):
    """A cache that nothing depends on: what cannot be read is compiled, what not written, lost."""

    _impl_class = _Implementation

    def __init__(self, function: Kernel, *key: object) -> None:
        super().__init__(function)
        self._key = key

    def _index_key(self, signature: object, codegen: Any) -> tuple:
        """Name the kernel, and the processor; numba would hash what the function refers to."""
        return (signature, codegen.magic_tuple(), self._key)

    def load_overload(self, signature: object, target: object) -> object:
        try:
            return super().load_overload(signature, target)
        except Exception:  # damaged files fail in as many ways as unpickling does
            return None

    def save_overload(self, signature: object, data: object) -> None:
        try:
            super().save_overload(signature, data)
        except OSError:
            return
        except Exception:  # numba reads the index before it adds to it, and that one is damaged
            with suppress(OSError):
                self.flush()
                super().save_overload(signature, data)
