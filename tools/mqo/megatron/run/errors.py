"""The errors that end a program of this package before anything is written, and causes of errors.

This module imports only the standard library, because `mqo` loads it without torch.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from mqo.megatron.run.untrusted import UntrustedFileError

FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("no space left on device", "disk quota exceeded")  # in messages of libraries and programs


class InferenceError(RuntimeError):
    """A user-correctable error.

    `found` and `expected` are clauses without a full stop; `help` is one sentence. `facts` are the
    three, for a caller that builds its own error.
    """

    def __init__(self, found: str, expected: str = "", help: str = "") -> None:
        parts = [f"{found}."]
        if expected:
            parts.append(f"Expected: {expected}.")
        if help:
            parts.append(f"{help}.")
        super().__init__(" ".join(parts))
        self.facts = {"found": found, "expected": expected, "help": help}


class DistillationError(InferenceError):
    """A teacher, a student and a configuration that do not fit each other."""


class PtqError(InferenceError):
    """A model, format, data or target that post-training quantization does not support."""


class SavedError(InferenceError):
    """A checkpoint, a tokenizer, a text or a task that cannot be run."""


@contextmanager
def reading(kind: Callable[..., Exception] = SavedError, help: str = "") -> Iterator[None]:
    """Raise `kind` for a file that the reader of untrusted files refuses."""
    try:
        yield
    except UntrustedFileError as refused:
        raise kind(refused.found, expected=refused.expected, help=help) from refused


@contextmanager
def building_tokenizer(
    where: object, kind: type[InferenceError] = SavedError, help: str = ""
) -> Iterator[None]:
    """Raise `kind` for any error of a library that loads the files of a tokenizer."""
    try:
        yield
    except Exception as error:
        clause = f"{where} is not a tokenizer: {words_of(error)}"
        raise kind(clause, "the folder of a tokenizer", help) from None  # it may advise to run code


def words_of(error: Exception) -> str:
    """Return the message of an error of transformers in one line, without advice to run code."""
    if "trust_remote_code" in str(error):
        return "it contains its own code, which is not run"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")


def leave(error: Exception) -> NoReturn:
    """Exit with the error's text, and write it to the file that MQO_FAILURE names."""
    if path := os.environ.get("MQO_FAILURE"):
        facts = getattr(error, "facts", {"found": str(error)})
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
    sys.exit(str(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes, and the errors that torch collected from all ranks."""
    left, seen = [error], set()
    while left:
        cause = left.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        left += [e for e in (cause.__cause__, cause.__context__) if e is not None]
        left += [wrapped[0] for wrapped in getattr(cause, "failures", {}).values()]


def is_full(error: BaseException) -> bool:
    """Return whether a full disk caused an error, by its number or by a library's message.

    Its causes count, too, and the output of a program in its `detail`.
    """
    for cause in chain(error):
        text = f"{cause} {getattr(cause, 'detail', '')}".lower()
        if getattr(cause, "errno", None) in FULL or any(words in text for words in _WORDS):
            return True
    return False


def nearest(path: Path) -> Path:
    """Return `path`, which is absolute, or the nearest folder above it that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())
