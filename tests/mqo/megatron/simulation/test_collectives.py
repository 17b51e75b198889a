"""Every operation of torch.distributed that upstream uses, its bytes counted by hand."""

import pytest
import torch
from mqo.megatron.simulation.collectives import Collectives
from mqo.megatron.simulation.unreal import without_data
from mqo.megatron.simulation.watch import Watch
from torch import distributed
from torch.distributed import _coalescing_manager
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD, N = 4, 64  # ranks; elements of a whole, fp32
WHOLE, PART = 4 * N, 4 * N // WORLD


@pytest.fixture
def counted():
    """A function that says what a function exchanges: one call, on tensors without data."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)

    def count(function, per_node=2):
        found = Collectives(per_node)
        with without_data(), Watch(found):
            function(torch.empty(N), torch.empty(N // WORLD))
        ((exchange, calls),) = found.counts.items()
        assert calls == 1
        return exchange

    yield count
    distributed.destroy_process_group()


def coalesced(function):
    def run(whole, part):
        with _coalescing_manager(async_ops=True) as work:
            function(whole, part)
        work.wait()

    return run


def gather(whole, part):
    distributed.all_gather_into_tensor(whole, part)


def scatter(whole, part):
    distributed.reduce_scatter_tensor(part, whole)


SHARE = (WORLD - 1) / WORLD


@pytest.mark.parametrize(
    ("function", "name", "size", "wire"),
    [
        (lambda w, p: distributed.all_reduce(w), "all-reduce", WHOLE, 2 * SHARE * WHOLE),
        (gather, "all-gather", WHOLE, SHARE * WHOLE),
        (coalesced(gather), "all-gather", WHOLE, SHARE * WHOLE),
        (
            lambda w, p: distributed.all_gather([p.clone() for _ in range(WORLD)], p),
            *("all-gather", WHOLE, SHARE * WHOLE),
        ),
        (scatter, "reduce-scatter", WHOLE, SHARE * WHOLE),
        (coalesced(scatter), "reduce-scatter", WHOLE, SHARE * WHOLE),
        (lambda w, p: distributed.broadcast(w, 0), "broadcast", WHOLE, WHOLE),
        (
            lambda w, p: distributed.all_to_all_single(w, w.clone(), [16] * 4, [16] * 4),
            *("all-to-all", WHOLE, SHARE * WHOLE),
        ),
        (lambda w, p: distributed.send(w, 1), "send", WHOLE, WHOLE),
        (lambda w, p: distributed.recv(w, 1), "receive", WHOLE, 0),
        (lambda w, p: distributed.all_reduce(w[:8]), "all-reduce", 32, 2 * SHARE * 32),
    ],
)
def test_an_exchange_is_counted_by_its_bytes(counted, function, name, size, wire):
    found = counted(function)
    assert (found.operation, found.size, found.wire) == (name, size, int(wire))
    assert (found.ranks, found.nodes) == (WORLD, 2)


@pytest.mark.parametrize(("per_node", "nodes"), [(1, 4), (2, 2), (3, 2), (8, 1)])
def test_nodes_are_those_that_the_ranks_lie_on(counted, per_node, nodes):
    assert counted(lambda w, p: distributed.all_reduce(w), per_node).nodes == nodes


def test_a_rank_alone_exchanges_nothing():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    found = Collectives(8)
    with without_data(), Watch(found):
        distributed.all_reduce(torch.empty(4))
    distributed.destroy_process_group()
    assert not found.counts
