"""What one process asks of all of them, and the group of a process without others."""

from typing import TypeVar

import torch

from mqo.megatron.device import HAS_CUDA

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank among all."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def all_ranks(here: T) -> list[T]:
    """Gather what every rank has, by rank; a collective. It must be picklable."""
    if not torch.distributed.is_initialized():
        return [here]
    ranks = [here] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, here)
    return ranks


def data_rank() -> tuple[int, int]:
    """Return this process's data-parallel rank, of how many; a context's ranks count as such."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return parallel_state.get_data_parallel_rank(with_context_parallel=True), size


def with_group() -> None:
    """Be a group of one process, unless there is a group: upstream's collectives want one."""
    if not torch.distributed.is_initialized():
        store, backend = torch.distributed.HashStore(), "nccl" if HAS_CUDA else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
