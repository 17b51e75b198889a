"""Gather keys and values for context parallelism, where a rank has two chunks of the queries.

Megatron splits a sequence into 2 * ranks chunks, and gives rank r the chunks r and
2 * ranks - 1 - r, so that causal attention costs every rank the same. A rank concatenates its
chunks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_into_tensor, reduce_scatter_tensor

# (rank, number of ranks)
SequencePart = tuple[int, int]


def gather_context(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Gather the whole sequence [s, ...], in order, from every rank's [s / ranks, ...].

    A collective, also in the backward pass, where a rank gets the summed gradient of its part.
    """
    return _Gather.apply(tensor, group)


def in_order(parts: Tensor, ranks: int) -> Tensor:
    """Return [s, ...] ordered by position, from the concatenated parts of the ranks."""
    pairs = parts.unflatten(0, (ranks, 2, -1))
    return torch.cat([pairs[:, 0], pairs[:, 1].flip(0)]).flatten(0, 1)


def by_rank(sequence: Tensor, ranks: int) -> Tensor:
    """Reverse `in_order`."""
    chunks = sequence.unflatten(0, (2 * ranks, -1))
    return torch.stack([chunks[:ranks], chunks[ranks:].flip(0)], dim=1).flatten(0, 2)


def chunk_starts(queries: int, part: SequencePart) -> tuple[int, int]:
    """Return the first positions of a rank's two chunks, which have `queries` positions."""
    rank, ranks = part
    return rank * queries // 2, (2 * ranks - 1 - rank) * queries // 2


def chunk_mask(queries: int, part: SequencePart, device: torch.device) -> Tensor:
    """Return a rank's causal mask [1, 1, queries, queries * ranks], True for a hidden key."""
    within = torch.arange(queries // 2, device=device)
    positions = torch.cat([start + within for start in chunk_starts(queries, part)])
    keys = torch.arange(queries * part[1], device=device)
    return (keys > positions[:, None])[None, None]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ranks = group, group.size()
        parts = tensor.new_empty(ranks * tensor.size(0), *tensor.shape[1:])
        all_gather_into_tensor(parts, tensor.contiguous(), group=group)
        return in_order(parts, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = by_rank(grad, ctx.group.size())
        own = parts.new_empty(parts.size(0) // ctx.group.size(), *parts.shape[1:])
        reduce_scatter_tensor(own, parts, group=ctx.group)
        return own, None
