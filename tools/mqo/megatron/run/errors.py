"""The errors that end a program of this package before anything is written."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from mqo.megatron.run.untrusted import UntrustedFileError


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
def reading(kind: type[InferenceError] = SavedError) -> Iterator[None]:
    """Raise `kind` for a file that the reader of untrusted files refuses."""

    try:
        yield
    except UntrustedFileError as refused:
        raise kind(refused.found, refused.expected) from refused


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
