"""The current training step, from which random seeds and schedules are derived."""

_step = 0
_total: int | None = None
_began = 0


def set_step(step: int, total: int | None = None) -> None:
    """Set the training step of this process (0 before the first call), and the total if known.

    `total` stays until it is set again. The count of micro-batches restarts.
    """
    global _step, _total, _began
    _step = int(step)
    _began += 1
    if total is not None:
        _total = int(total)


def step() -> int:
    """Return the current training step: the number of completed steps."""
    return _step


def total() -> int | None:
    """Return the number of training steps; None if it was not set."""
    return _total


def began() -> int:
    """Return the number of calls of `set_step`, which distinguishes steps with the same number."""
    return _began
