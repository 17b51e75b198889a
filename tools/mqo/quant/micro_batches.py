"""Which micro-batch of a step a layer runs: stochastic rounding draws anew in each.

A layer's forward passes of a step are its micro-batches, in order. One that is recomputed for
backward is told by autograd, which then runs backward, and the recomputed ones come in the order of
the first: a layer that is called several times in a micro-batch and recomputed is the exception,
and its recomputed passes draw as others of the same step. Backward passes are not counted, since
pipelines interleave them: what a forward pass was is kept with what it saved.
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
    """Say which data-parallel rank this process is, of how many."""
    global _replica
    _replica = (rank, size)


def begin(layer: str) -> None:
    """Say that a forward pass of `layer` begins."""
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
    """Leave the forward passes of this block uncounted: those that follow get the same numbers."""
    before = Counter(_forward) if _counted_since == began() else Counter()
    try:
        yield
    finally:
        _forward.clear()
        _forward.update(before)


@contextmanager
def extra_pass() -> Iterator[None]:
    """Neither record nor count what is quantized in this block, which is no step's.

    Stochastic rounding draws the same numbers in the block and in the forward passes after it.
    """
    with RECORDER.paused(), uncounted():
        yield


def keep(ctx: object) -> None:
    """Keep with `ctx`, of an autograd.Function, which micro-batch its forward pass is of."""
    setattr(ctx, _KEPT, _now)


def resume(ctx: object) -> None:
    """Say that the backward pass of `ctx` begins."""
    global _now
    _now = getattr(ctx, _KEPT, 0)


def now() -> int:
    """Return the micro-batch of the pass that runs, counted over all data-parallel ranks.

    As upstream's samplers deal them out: a step's first micro-batch of each rank, then the second.
    """
    rank, size = _replica or _process()
    return _now * size + rank


def _process() -> tuple[int, int]:
    """Return which process this is, of how many: what counts where nobody named the replica."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
