"""How many tokens go where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.megatron.simulation.routing import local_counts, shares


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_shares_are_even_and_lose_nothing(rows, parts):
    found = shares(rows, parts)
    assert (len(found), found.sum()) == (parts, rows)
    assert found.max() - found.min() <= 1


@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(1, 64), st.floats(1, 10))
def test_an_imbalance_never_makes_tokens(rows, ranks, experts, imbalance):
    found = local_counts(rows, ranks, experts, imbalance)
    assert 0 <= found.sum() <= rows
    if ranks == 1:
        assert found.sum() == rows


@pytest.mark.parametrize(("imbalance", "rows"), [(1.0, 256), (1.5, 384), (100.0, 1024)])
def test_a_rank_gets_so_many_times_its_share(imbalance, rows):
    assert local_counts(1024, 4, 16, imbalance).sum() == rows
