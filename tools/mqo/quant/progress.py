"""How far training is: what the seeds of stochastic rounding and the schedules follow from."""

_step = 0
_total: int | None = None
_began = 0


def set_step(step: int, total: int | None = None) -> None:
    """Say which training step this process is in (0 until then), and of how many if that is known.

    A `total` stays until another is said. Micro-batches are counted anew from here.
    """
    global _step, _total, _began
    _step = int(step)
    _began += 1
    if total is not None:
        _total = int(total)


def step() -> int:
    """Return the training step this process is in: how many are done."""
    return _step


def total() -> int | None:
    """Return how many steps the training takes; None where nobody said."""
    return _total


def began() -> int:
    """Return how often `set_step` was called: it tells two steps apart that have one number."""
    return _began
