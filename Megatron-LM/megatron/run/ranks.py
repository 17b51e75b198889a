"""What one process asks of all of them, and the group of a process without others."""

from typing import TypeVar

import torch
from megatron.device import HAS_CUDA

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


def with_group() -> None:
    """Be a group of one process, unless there is a group: upstream's collectives want one."""
    if not torch.distributed.is_initialized():
        store, backend = torch.distributed.HashStore(), "nccl" if HAS_CUDA else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
