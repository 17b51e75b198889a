"""Gather objects from all ranks, and form the group of a single process."""

from typing import TypeVar

import torch

from mqo.megatron.device import HAS_CUDA

T = TypeVar("T")


def rank() -> int:
    """Return the global rank of this process."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def all_ranks(here: T) -> list[T]:
    """Return the objects of all ranks, by rank; a collective. They must be picklable."""
    if not torch.distributed.is_initialized():
        return [here]
    ranks = [here] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, here)
    return ranks


def data_rank() -> tuple[int, int]:
    """Return this process's data-parallel rank and their number, including context ranks."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return parallel_state.get_data_parallel_rank(with_context_parallel=True), size


def with_group() -> None:
    """Form a group of one process unless there is a group: upstream's collectives need one."""
    if not torch.distributed.is_initialized():
        store, backend = torch.distributed.HashStore(), "nccl" if HAS_CUDA else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
