"""Which micro-batch of a step a layer runs: stochastic rounding draws anew in each.

A layer's forward passes of a step are its micro-batches, in order. One that is recomputed for
backward is told by autograd, which then runs backward, and the recomputed ones come in the order of
the first: a layer that is called several times in a micro-batch and recomputed is the exception,
and its recomputed passes draw as others of the same step. Backward passes are not counted, since
pipelines interleave them: what a forward pass was is kept with what it saved.
"""

from collections import Counter

import torch

_forward: Counter[str] = Counter()
_recomputed: Counter[str] = Counter()
_now = 0
_KEPT = "mqo_micro_batch"


def restart() -> None:
    """Count from 0 again."""
    global _now
    _forward.clear()
    _recomputed.clear()
    _now = 0


def begin(layer: str) -> None:
    """Say that a forward pass of `layer` begins."""
    global _now
    # Within a backward pass autograd has a graph task, and Megatron and torch recompute within it.
    recomputes = torch._C._current_graph_task_id() != -1
    counts = _recomputed if recomputes else _forward
    _now = counts[layer]
    counts[layer] += 1


def keep(ctx: object) -> None:
    """Keep with `ctx`, of an autograd.Function, which micro-batch its forward pass is of."""
    setattr(ctx, _KEPT, _now)


def resume(ctx: object) -> None:
    """Say that the backward pass of `ctx` begins."""
    global _now
    _now = getattr(ctx, _KEPT, 0)


def now() -> int:
    """Return the micro-batch of the pass that runs, from 0 in each step."""
    return _now
