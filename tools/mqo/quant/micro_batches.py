"""Counts micro-batches per layer, because stochastic rounding draws new numbers in each.

The forward passes of a layer in a step are its micro-batches, in order. A forward pass is a
recomputed one if autograd is running backward. Recomputed passes come in the order of the original
ones, except for a layer that is called several times per micro-batch: its recomputed passes use the
draws of other passes of the same step. Backward passes are not counted, because pipelines
interleave them. Instead the number of a forward pass is kept with its saved tensors.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mqo.quant.progress import began
from mqo.quant.record import RECORDER

_forward: Counter[str] = Counter()
_recomputed: Counter[str] = Counter()
_counted_since = 0
_now = 0
_replica: tuple[int, int] | None = None
_KEPT = "mqo_micro_batch"


def set_replica(rank: int, size: int) -> None:
    """Set the data-parallel rank of this process, and the number of ranks."""
    global _replica
    _replica = (rank, size)


def begin(layer: str) -> None:
    """Count a forward pass of `layer`."""
    global _now, _counted_since
    if _counted_since != began():
        _counted_since = began()
        _forward.clear()
        _recomputed.clear()
    # Within a backward pass autograd has a graph task, and Megatron and torch recompute within it.
    recomputes = torch._C._current_graph_task_id() != -1
    counts = _recomputed if recomputes else _forward
    _now = counts[layer]
    counts[layer] += 1


@contextmanager
def uncounted() -> Iterator[None]:
    """Do not count forward passes in this block, so that it does not change later numbers."""
    before = Counter(_forward) if _counted_since == began() else Counter()
    try:
        yield
    finally:
        _forward.clear()
        _forward.update(before)


@contextmanager
def extra_pass() -> Iterator[None]:
    """Neither record nor count quantization in this block, which is not part of a step.

    Stochastic rounding draws the same numbers in this block and in the forward passes after it.
    """
    with RECORDER.paused(), uncounted():
        yield


def keep(ctx: object) -> None:
    """Store the micro-batch of the current forward pass in an autograd.Function's `ctx`."""
    setattr(ctx, _KEPT, _now)


def resume(ctx: object) -> None:
    """Make the micro-batch of `ctx` the current one, at the start of its backward pass."""
    global _now
    _now = getattr(ctx, _KEPT, 0)


def now() -> int:
    """Return the micro-batch of the current pass, counted over all data-parallel ranks.

    The order is that of upstream's samplers: the first micro-batch of every rank, then the second.
    """
    rank, size = _replica or _process()
    return _now * size + rank


def _process() -> tuple[int, int]:
    """Return the rank and world size of this process, used if `set_replica` was not called."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
