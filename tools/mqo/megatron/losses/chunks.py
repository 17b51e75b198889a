"""What the losses share: chunks of tokens, shifted logits in fp32, reductions over ranks.

Logits are rows [tokens, v], v the part of the vocabulary that this rank holds.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

# Elements of a chunk by device type. A CPU keeps 4 MiB of fp32 in its caches: measured, faster than
# 16 or 64. A GPU takes more at once, so that its launches cost little; that was not measured.
CHUNK_ELEMENTS = {"cpu": 2**20}
CHUNK_ELEMENTS_ELSEWHERE = 2**23


def as_rows(tensor: Tensor) -> Tensor:
    """Return [..., v] as [tokens, v]; a view where the tensor is contiguous."""
    return tensor.reshape(-1, tensor.size(-1))


def chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each of a chunk's elements at most, and of one row at least."""
    elements = CHUNK_ELEMENTS.get(rows.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    step = max(1, elements // max(1, rows.size(-1)))
    for start in range(0, rows.size(0), step):
        yield slice(start, min(start + step, rows.size(0)))


def shifted(rows: Tensor, highest: Tensor, temperature: float = 1.0) -> Tensor:
    """Return rows / temperature - highest in fp32, in memory of its own; `highest` is [tokens]."""
    result = rows.to(torch.float32, copy=True)
    if temperature != 1:
        result.div_(temperature)
    return result.sub_(highest.unsqueeze(-1))


def reduced(own: Tensor, operation: ReduceOp.RedOpType, group: ProcessGroup | None) -> Tensor:
    """Return `own`, reduced in place over the ranks that share a vocabulary."""
    if group is not None and group.size() > 1:
        all_reduce(own, op=operation, group=group)
    return own
