"""Gather objects from all ranks."""

from typing import TypeVar

import torch

T = TypeVar("T")


def all_ranks(here: T) -> list[T]:
    """Return the objects of all ranks, by rank; a collective. They must be picklable."""
    if not torch.distributed.is_initialized():
        return [here]
    ranks = [here] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, here)
    return ranks
