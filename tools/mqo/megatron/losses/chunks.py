"""Shared parts of the losses: chunks of tokens, shifted logits in fp32, reductions over ranks.

Logits are rows [tokens, v], where v is this rank's part of the vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

# Elements of a chunk by device type. On a CPU, 4 MiB of fp32 fit in the caches, and measured faster
# than 16 or 64. On a GPU larger chunks need fewer launches; that was not measured.
CHUNK_ELEMENTS = {"cpu": 2**20}
CHUNK_ELEMENTS_ELSEWHERE = 2**23


def as_rows(tensor: Tensor) -> Tensor:
    """Return [..., v] as [tokens, v]; a view if the tensor is contiguous."""
    return tensor.reshape(-1, tensor.size(-1))


def chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each with at most a chunk's elements and at least one row."""
    elements = CHUNK_ELEMENTS.get(rows.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    step = max(1, elements // max(1, rows.size(-1)))
    for start in range(0, rows.size(0), step):
        yield slice(start, min(start + step, rows.size(0)))


def shifted(rows: Tensor, highest: Tensor, temperature: float = 1.0) -> Tensor:
    """Return rows / temperature - highest in fp32, as a new tensor; `highest` is [tokens]."""
    result = rows.to(torch.float32, copy=True)
    if temperature != 1:
        result.div_(temperature)
    return result.sub_(highest.unsqueeze(-1))


def reduced(own: Tensor, operation: ReduceOp.RedOpType, group: ProcessGroup | None) -> Tensor:
    """Reduce `own` in place over the ranks that share a vocabulary, and return it."""
    if group is not None and group.size() > 1:
        all_reduce(own, op=operation, group=group)
    return own
