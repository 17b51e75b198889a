"""A process group of this process alone."""

import pytest
import torch


def join_alone():
    """Replace all process groups by one of this process alone."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


@pytest.fixture(scope="module")
def one_rank():
    """Make the process a group of its own, and return that group."""
    join_alone()
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def no_group_left():
    """Fail where a file leaves a group to those that the same worker runs after it."""
    yield
    assert not torch.distributed.is_initialized()
