"""Gather keys and values for context parallelism, where a rank has two chunks of the queries.

Megatron splits a sequence into 2 * ranks chunks, and gives rank r the chunks r and
2 * ranks - 1 - r, so that causal attention costs every rank the same. A rank concatenates its
chunks.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# (rank, number of ranks)
SequencePart = tuple[int, int]


def gather_context(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Gather the whole sequence [s, ...], in order, from every rank's [s / ranks, ...].

    A collective, also in the backward pass, where a rank gets the summed gradient of its part.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    return in_order(gather_from_sequence_parallel_region(tensor, group=group), group.size())


def in_order(parts: Tensor, ranks: int) -> Tensor:
    """Return [s, ...] ordered by position, from the concatenated parts of the ranks."""
    early, late = parts.unflatten(0, (ranks, 2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


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
