"""What ends a program of this package before anything is written."""

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
    three, for who words it otherwise.
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
    """A teacher, a student or a configuration that do not go together."""


class PtqError(InferenceError):
    """A model, a format, data or a target that post-training quantization cannot take."""


class SavedError(InferenceError):
    """A checkpoint, a tokenizer, a text or a task that cannot be run."""


@contextmanager
def reading(kind: type[InferenceError] = SavedError) -> Iterator[None]:
    """Raise `kind` for a file that the reader of files from elsewhere refuses."""

    try:
        yield
    except UntrustedFileError as refused:
        raise kind(refused.found, refused.expected) from refused


@contextmanager
def building_tokenizer(
    where: object, kind: type[InferenceError] = SavedError, help: str = ""
) -> Iterator[None]:
    """Raise `kind` for whatever a library raises of the files of a tokenizer."""
    try:
        yield
    except Exception as error:
        found = f"{where} is no tokenizer: {words_of(error)}"
        raise kind(found, "a tokenizer's folder", help) from None  # it may advise to run code


def words_of(error: Exception) -> str:
    """Return what an error of transformers says, in one line, without advice to run code."""
    if "trust_remote_code" in str(error):
        return "it names code of its own, which is not run"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")


def leave(error: Exception) -> NoReturn:
    """Exit with the error's text, and write it to the file that MQO_FAILURE names."""
    if place := os.environ.get("MQO_FAILURE"):
        facts = getattr(error, "facts", {"found": str(error)})
        Path(place).write_text(json.dumps(facts), encoding="utf-8")
    sys.exit(str(error))
