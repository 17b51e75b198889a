"""What ends a distillation before its first step."""


class DistillationError(RuntimeError):
    """A teacher, a student or a configuration that do not go together.

    `found` and `expected` are clauses without a full stop; `help` is one sentence.
    """

    def __init__(self, found: str, *, expected: str = "", help: str = "") -> None:
        parts = [f"{found}."]
        if expected:
            parts.append(f"Expected: {expected}.")
        if help:
            parts.append(f"{help}.")
        super().__init__(" ".join(parts))
