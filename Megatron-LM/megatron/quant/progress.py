"""How far training is: what the seeds of stochastic rounding and the schedules follow from."""

import torch

from . import micro_batches

_step = 0
_total: int | None = None
_replica: tuple[int, int] | None = None


def set_step(step: int, total: int | None = None) -> None:
    """Say which training step this process is in (0 until then), and of how many if that is known.

    A `total` stays until another is said. Micro-batches are counted anew.
    """
    global _step, _total
    _step = int(step)
    micro_batches.restart()
    if total is not None:
        _total = int(total)


def step() -> int:
    """Return the training step this process is in: how many are done."""
    return _step


def set_replica(rank: int, size: int) -> None:
    """Say which data-parallel rank this process is, of how many."""
    global _replica
    _replica = (rank, size)


def replica() -> tuple[int, int]:
    """Return what `set_replica` was told; where nobody said, the process and how many there are."""
    if _replica is not None:
        return _replica
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def total() -> int | None:
    """Return how many steps the training takes; None where nobody said."""
    return _total
