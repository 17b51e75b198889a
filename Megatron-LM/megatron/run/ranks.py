"""What one process asks of all of them."""

from typing import TypeVar

import torch

T = TypeVar("T")


def rank() -> int:
    """This process's rank among all."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def all_ranks(here: T) -> list[T]:
    """What every rank has, by rank; a collective. It must be picklable."""
    if not torch.distributed.is_initialized():
        return [here]
    ranks = [here] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, here)
    return ranks
