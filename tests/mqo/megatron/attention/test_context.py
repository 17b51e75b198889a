"""The two chunks of each context-parallel rank, against the whole sequence in one process."""

import pytest
import torch
from mqo.megatron.attention.context import (
    chunk_mask,
    chunk_starts,
    gather_context,
    in_order,
)

from .conftest import Layer, Tracker, written_out
from .test_choice import MXFP8, NONE, path
from .test_paths import fused_context

RANKS = 3


def positions(length, part):
    """The rank's own positions, in the order that it has them in."""
    size = length // (2 * part[1])
    return torch.cat([torch.arange(s, s + size) for s in chunk_starts(2 * size, part)])


def test_every_rank_has_an_early_and_a_late_chunk():
    assert [positions(12, (rank, RANKS)).tolist() for rank in range(RANKS)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]


def test_the_parts_of_all_ranks_come_into_order():
    parts = torch.cat([positions(12, (rank, RANKS)) for rank in range(RANKS)])[:, None]
    assert in_order(parts, RANKS).flatten().tolist() == list(range(12))


class Group:
    """Stands for a group of ranks whose parts are all known."""

    def size(self):
        return RANKS


def test_a_rank_gathers_the_sequence_and_gets_the_gradient_of_its_own_part(monkeypatch):
    mappings = pytest.importorskip("megatron.core.tensor_parallel.mappings")
    parts = [positions(12, (rank, RANKS))[:, None].double() for rank in range(RANKS)]

    def gather(out, own, group):
        assert torch.equal(own, parts[1])
        out.copy_(torch.cat(parts))

    def scatter(own, all_parts, group):
        own.copy_(all_parts.chunk(RANKS)[1])

    monkeypatch.setattr(mappings, "get_tensor_model_parallel_group_if_none", lambda group: group)
    monkeypatch.setattr(mappings, "dist_all_gather_func", gather)
    monkeypatch.setattr(mappings, "dist_reduce_scatter_func", scatter)
    own = parts[1].clone().requires_grad_()
    whole = gather_context(own, Group())
    assert whole.flatten().tolist() == list(range(12))
    (whole * whole).sum().backward()
    assert torch.equal(own.grad, 2 * parts[1])


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_mask_of_a_rank_is_its_rows_of_the_causal_one(rank):
    whole = torch.ones(12, 12, dtype=torch.bool).triu(1)
    mask = chunk_mask(4, (rank, RANKS), torch.device("cpu"))
    assert torch.equal(mask, whole[positions(12, (rank, RANKS))][None, None])


@pytest.mark.parametrize("shape", [{}, {"groups": 2, "value_width": 8}], ids=str)
@pytest.mark.parametrize("rank", range(RANKS))
def test_fused_a_rank_has_its_rows_of_the_context_and_of_the_gradients(operands, rank, shape):
    query, key, value = operands(48, 48, **shape)
    mine = positions(48, (rank, RANKS))
    layer = Layer()
    layer.mqo_part = (rank, RANKS)
    found = fused_context(layer, query[mine], key, value, Tracker())
    expected = written_out(query, key, value, layer.softmax_scale)[mine]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
    tensors = (query, key, value)
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    right = torch.autograd.grad((expected * weights).sum(), tensors)
    torch.testing.assert_close(gradients, right, rtol=1e-4, atol=1e-5)


def test_a_rank_needs_no_scores_when_it_has_all_the_keys():
    layer = Layer()
    layer.mqo_part = (1, RANKS)
    query, key = torch.ones(4, 1, 2, 8), torch.ones(12, 1, 2, 8)
    mask = chunk_mask(4, (1, RANKS), torch.device("cpu"))
    for types in (NONE, MXFP8):
        assert path(layer, types, query, key, None)
        assert path(layer, types, query, key[:4], None) is None
    assert path(layer, NONE, query, key, mask) is None
    assert path(layer, MXFP8, query, key, mask)
