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

from mqo.quant.progress import Progress

_KEPT = "mqo_micro_batch"


class MicroBatches:
    """The micro-batches of one model in the current step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._forward: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()
        self._counted_since = progress.began
        self._now = 0
        self.replica: tuple[int, int] | None = None

    def set_replica(self, rank: int, size: int) -> None:
        """Set the data-parallel rank of this process, and the number of ranks."""
        self.replica = (rank, size)

    def begin(self, layer: str) -> None:
        """Count a forward pass of `layer`."""
        if self._counted_since != self._progress.began:
            self._counted_since = self._progress.began
            self._forward.clear()
            self._recomputed.clear()
        # Within a backward pass autograd has a graph task, and Megatron and torch recompute there.
        recomputes = torch._C._current_graph_task_id() != -1
        counts = self._recomputed if recomputes else self._forward
        self._now = counts[layer]
        counts[layer] += 1

    def begin_uncounted(self) -> None:
        """Start a forward pass that is not part of a step; it draws as micro-batch 0."""
        self._now = 0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count forward passes in this block, so that it does not change later numbers."""
        is_current = self._counted_since == self._progress.began
        before = Counter(self._forward) if is_current else Counter()
        try:
            yield
        finally:
            self._forward.clear()
            self._forward.update(before)

    def keep(self, ctx: object) -> None:
        """Store the micro-batch of the current forward pass in an autograd.Function's `ctx`."""
        setattr(ctx, _KEPT, (self, self._now))

    def now(self) -> int:
        """Return the micro-batch of the current pass, counted over all data-parallel ranks.

        The order is that of upstream's samplers: the first micro-batch of every rank, then the
        second.
        """
        rank, size = self.replica or _process()
        return self._now * size + rank


def resume(ctx: object) -> None:
    """Make the micro-batch of `ctx` its model's current one, at the start of a backward pass."""
    if kept := getattr(ctx, _KEPT, None):
        micro_batches, number = kept
        micro_batches._now = number


def _process() -> tuple[int, int]:
    """Return the rank and world size of this process, used if `set_replica` was not called."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
