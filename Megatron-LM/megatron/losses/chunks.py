"""What the losses share: chunks of tokens, shifted logits in fp32, reductions over ranks.

Logits are rows [tokens, v], v the part of the vocabulary that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

# A chunk in fp32 takes 64 MiB: large enough that a GPU's launches cost nothing beside its work.
CHUNK_ELEMENTS = 2**24


def as_rows(tensor: Tensor) -> Tensor:
    """Return [..., v] as [tokens, v]; a view where the tensor is contiguous."""
    return tensor.reshape(-1, tensor.size(-1))


def chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each of at most CHUNK_ELEMENTS elements and at least one row."""
    step = max(1, CHUNK_ELEMENTS // max(1, rows.size(-1)))
    for start in range(0, rows.size(0), step):
        yield slice(start, min(start + step, rows.size(0)))


def shifted(rows: Tensor, highest: Tensor, temperature: float = 1.0) -> Tensor:
    """Return rows / temperature - highest in fp32, in memory of its own; `highest` is [tokens]."""
    result = rows.to(torch.float32, copy=True)
    if temperature != 1:
        result.div_(temperature)
    return result.sub_(highest.unsqueeze(-1))


def reduced(own: Tensor, operation: ReduceOp, group: ProcessGroup | None) -> Tensor:
    """Return `own`, reduced in place over the ranks that share a vocabulary."""
    if group is not None and group.size() > 1:
        all_reduce(own, op=operation, group=group)
    return own
