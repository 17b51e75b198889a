"""How attention is cut: every query once, with all that it sees, in memory that is bounded."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mqo.megatron.attention.chunks import BUDGET, ChunkPlan, Span, Visible

numbers = st.integers(1, 3000)


@st.composite
def plans(draw):
    queries = draw(numbers)
    keys = draw(st.integers(queries, 6000))
    cut = draw(st.integers(0, queries - 1))
    early = draw(st.integers(0, keys - queries))
    spans = [Span(0, cut, early)] if cut else []
    late = keys - queries + cut
    first = draw(st.integers(0, late))
    return ChunkPlan(
        matrices=draw(st.integers(1, 20)),
        repeats=draw(st.integers(1, 8)),
        queries=queries,
        keys=keys,
        visible=Visible((*spans, Span(cut, queries, late, first))),
        block=draw(st.sampled_from([1, 16, 32, 64, 128])),
        device="cpu",
    )


@given(plans(), st.booleans())
def test_every_query_of_every_matrix_is_in_one_chunk_with_all_that_it_sees(plan, whole):
    lengths, plan = set(), replace(plan, whole=whole)
    counted = torch.zeros(plan.matrices, plan.queries, dtype=torch.int32)
    for chunk in plan.chunks():
        counted[chunk.first : chunk.last, chunk.start : chunk.stop] += 1
        (span,) = (s for s in plan.visible.spans if s.start <= chunk.start < chunk.stop <= s.stop)
        first_sees = span.position + chunk.start - span.start + 1
        last_sees = first_sees + chunk.stop - chunk.start - 1
        assert last_sees <= chunk.high <= plan.keys
        assert chunk.later == max(0, chunk.high - first_sees)
        assert chunk.low + chunk.before == span.first
        assert chunk.high % plan.block == 0 or chunk.high == plan.keys
        assert chunk.low % plan.block == 0
        assert (chunk.low, chunk.high) == (0, plan.keys) or not whole
        lengths.add(chunk.high - chunk.low)
        assert (chunk.last - chunk.first) * (chunk.stop - chunk.start) * (
            chunk.high - chunk.low
        ) * plan.repeats <= plan.elements
    assert len(lengths) <= 17
    assert counted.min() == counted.max() == 1


@given(plans())
def test_a_chunk_takes_no_more_than_the_budget_or_the_fewest_queries_of_one_matrix(plan):
    least = plan.repeats * min(32, plan.queries) * plan.keys
    assert plan.elements <= max(BUDGET["cpu"], least)


@pytest.mark.parametrize(
    ("keys", "seen"),
    [(512, [64, 128, 192, 256, 320, 384, 448, 512]), (4096, [*range(256, 4097, 256)])],
)
def test_a_causal_chunk_reads_up_to_the_end_of_a_block_that_it_ends_in(keys, seen, monkeypatch):
    monkeypatch.setitem(BUDGET, "cpu", 32 * keys)
    plan = ChunkPlan(1, 1, keys, keys, Visible((Span(0, keys, 0),)), 64, "cpu")
    assert sorted({chunk.high for chunk in plan.chunks()}) == seen
