"""The ranks of this process, and the group of a single process."""

import torch

from mqo.megatron.device import HAS_CUDA


def rank() -> int:
    """Return the global rank of this process."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


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
