"""What ends a program of this package before anything is written."""

from __future__ import annotations


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
    """A checkpoint, a tokenizer or a text that cannot be run."""
