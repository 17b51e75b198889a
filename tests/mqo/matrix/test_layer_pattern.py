"""Patterns of layers, their blocks and their stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.matrix import tables
from mqo.matrix.layer_pattern import (
    ATTENTION,
    MAMBA,
    MLA,
    MOE,
    PatternError,
    blocks_of,
    check,
    in_stages,
    layers_of,
)

PATTERNS = st.text("*-E", min_size=1)


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("*-*-", ("*-", "*-")),
        ("+-|+E", ("+-", "+E")),
        ("*--**E", ("*--", "*", "*E")),
        ("-E*-", ("-E", "*-")),
        ("M-MM*-", ("M-", "M", "M", "*-")),
    ],
)
def test_a_block_is_a_mixer_and_the_layers_behind_it(pattern, blocks):
    assert blocks_of(pattern) == blocks


@given(PATTERNS)
def test_blocks_hold_each_layer_once_and_in_order(pattern):
    blocks = blocks_of(pattern)
    assert "".join(blocks) == pattern
    assert [layer for block in layers_of(blocks) for layer in block] == [*range(len(pattern))]
    assert all(block[0] == ATTENTION for block in blocks[1:])


@pytest.mark.parametrize("name", tables.script_models())
def test_published_gpts_have_a_pattern_of_two_layers_per_block(name):
    model = tables.models()[name]
    hybrid = model.model_copy(update={"pattern": "".join(model.blocks)})
    hybrid.check_pattern()
    assert hybrid.blocks == model.blocks
    assert {len(block) for block in model.blocks} == {2}
    sparse = model.num_layers - model.moe.dense_layers if model.moe else 0
    assert sum(MOE in block for block in model.blocks) == sparse


@given(PATTERNS, st.integers(1, 6))
def test_stages_share_the_blocks_equally_or_are_refused(pattern, stages):
    blocks = blocks_of(pattern)
    if len(blocks) % stages:
        with pytest.raises(PatternError):
            in_stages(pattern, stages)
        return
    parts = in_stages(pattern, stages).split("|")
    assert "".join(parts) == pattern
    assert len(parts) == stages
    assert {len(blocks_of(part)) for part in parts} == {len(blocks) // stages}


@pytest.mark.parametrize(
    ("pattern", "stages", "expected"),
    [
        ("*-|*-*-", 1, "*-*-*-"),
        ("*-|*-*-", 2, "*-|*-*-"),
        ("*-|*-|*-|*-", 2, "*-|*-|*-|*-"),  # two segments a stage
        ("*-|*-*-", 3, None),
    ],
)
def test_given_stages_are_kept(pattern, stages, expected):
    if expected is None:
        with pytest.raises(PatternError):
            in_stages(pattern, stages)
    else:
        assert in_stages(pattern, stages) == expected


SIZES = {ATTENTION: True, MLA: False, MOE: True, MAMBA: False}


@pytest.mark.parametrize(
    ("pattern", "sizes", "named"),
    [
        ("", SIZES, "without layers"),
        ("*-||*E", SIZES, "without layers"),
        ("*-*E|", SIZES, "without layers"),
        ("*-xE", SIZES, "'x'"),
        ("M-*E", SIZES, "Mamba"),
        ("*E", SIZES | {MAMBA: True}, "no Mamba"),
        ("G-*E", SIZES, "gated delta nets"),
        ("*-*E/*-", SIZES, "multi-token"),
        ("*-+E", SIZES, "MLA"),
        ("*-*-", SIZES, "experts"),
        ("-E-E", SIZES, "attention"),
    ],
)
def test_other_patterns_are_refused_by_what_is_wrong(pattern, sizes, named):
    with pytest.raises(PatternError, match=named):
        check(pattern, sizes)
