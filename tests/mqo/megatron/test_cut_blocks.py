"""What one process quantizes, ranks quantize to the same bits, or it is refused."""

from types import SimpleNamespace

import pytest
from mqo.megatron.cut_blocks import cut_blocks
from mqo.megatron.layers import FoundLayer
from mqo.quant import config
from mqo.quant.formats import FORMATS, SITES
from mqo.quant.labels import Layer

FC1 = "decoder.layers.0.mlp.linear_fc1"
FC2 = "decoder.layers.0.mlp.linear_fc2"
ALL = set(SITES)


class ColumnParallelLinear:
    def __init__(self, size, ranks, gated=False):
        self.output_size, self.output_size_per_partition = size, size // ranks
        self.config = SimpleNamespace(gated_linear_unit=gated)


class RowParallelLinear:
    def __init__(self, size, ranks):
        self.input_size, self.input_size_per_partition = size, size // ranks


def cuts(*modules, sites=ALL, block=32, squares=(), chunk_tokens=0, excluded=()):
    names = {"ColumnParallelLinear": FC1, "RowParallelLinear": FC2}
    found = [
        FoundLayer(Layer(names[type(m).__name__], "linear", type(m).__name__), m, m)
        for m in modules
    ]
    blocks = dict.fromkeys(sites, block)
    sides = dict.fromkeys(squares, block)
    return cut_blocks(blocks, sides, found, chunk_tokens, lambda site, layer: layer in excluded)


def test_parts_of_whole_blocks_are_sound():
    assert cuts(ColumnParallelLinear(128, 2, gated=True), RowParallelLinear(64, 2)) == []


def test_one_rank_may_have_a_short_block_as_ever():
    assert cuts(ColumnParallelLinear(40, 1), RowParallelLinear(40, 1)) == []


def test_a_row_parallel_part_cuts_the_sum_of_fprop():
    (text,) = cuts(RowParallelLinear(96, 2))
    assert text.startswith("fprop: ") and " 48 " in text and " 96 " in text
    assert f" {FC2} (RowParallelLinear" in text and " 32: " in text
    assert cuts(RowParallelLinear(96, 2), block=16) == []
    assert cuts(RowParallelLinear(96, 2), sites={"dgrad", "wgrad"}) == []
    assert cuts(RowParallelLinear(96, 2), excluded=[FC2]) == []


def test_a_column_parallel_part_cuts_the_sum_of_dgrad():
    (text,) = cuts(ColumnParallelLinear(96, 2))
    assert text.startswith("dgrad: a rank has 48 of the 96 elements")
    assert cuts(ColumnParallelLinear(96, 2), sites={"fprop"}) == []


@pytest.mark.parametrize(
    ("split", "cut"),
    [
        (RowParallelLinear, {"dgrad.weight", "wgrad.x"}),
        (ColumnParallelLinear, {"fprop.weight", "wgrad.grad"}),
    ],
)
@pytest.mark.parametrize("square", ["fprop.x", "fprop.weight", "dgrad.grad", "dgrad.weight"])
def test_squares_are_cut_along_the_axis_that_is_no_sum(split, cut, square):
    faults = cuts(split(96, 2), sites=(), squares=[square])
    assert [text.partition(":")[0] for text in faults] == [
        square.partition(".")[0] for _ in cut & {square}
    ]
    assert cuts(split(128, 2), sites=(), squares=[square]) == []
    assert bool(cuts(chunk_tokens=48, sites=(), squares=[square])) == (
        square in {"fprop.x", "dgrad.grad"}
    )


def test_the_squares_of_a_run_are_its_rows(options):
    rows = '[operands]\n"dgrad.weight" = { tile = "square" }\n"wgrad.x" = { tile = "square" }\n'
    options('[asked]\ndgrad = "nvfp4"\nwgrad = "hif4"\n' + rows)
    assert config.current().squares() == {"dgrad.weight": 16}  # hif4 has none


def test_gate_and_up_are_two_sums():
    assert cuts(ColumnParallelLinear(192, 2)) == []
    (text,) = cuts(ColumnParallelLinear(192, 2, gated=True))
    assert " 48 " in text and " 96 " in text


def mamba_input_projection(ranks, heads, width=16, groups=2, state=32):
    """in_proj of a Mamba layer: gates, inputs, two projections and step sizes, concatenated."""
    sizes = (heads * width, heads * width, groups * state, groups * state, heads)
    layer = ColumnParallelLinear(sum(sizes), ranks)
    layer.weight = SimpleNamespace(partition_sizes=[size // ranks for size in sizes])
    return layer


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"heads": 64}, None),
        ({"heads": 32}, "16 of the 32 "),  # the step sizes
        ({"heads": 64, "groups": 4, "state": 24}, "48 of the 96 "),  # the projections
        ({"heads": 32, "state": 24}, "24 of the 48 "),  # all five are 18 blocks together
        ({"heads": 16, "width": 5}, "40 of the 80 "),
    ],
)
def test_each_of_the_five_parts_of_a_mamba_layer_holds_whole_blocks(sizes, part):
    blocks = cuts(mamba_input_projection(2, **sizes), sites={"dgrad"})
    squares = cuts(mamba_input_projection(2, **sizes), sites=(), squares=["fprop.weight"])
    for texts in (blocks, squares):
        assert len(texts) == bool(part)
        assert all(f"a rank has {part}" in text for text in texts)
    assert cuts(mamba_input_projection(1, **sizes)) == []


def test_layers_of_one_cut_are_one_text():
    (text,) = cuts(RowParallelLinear(96, 2), RowParallelLinear(96, 2))
    assert "and 1 more" in text


def test_a_chunk_of_the_context_must_hold_whole_blocks_of_tokens():
    (text,) = cuts(chunk_tokens=48)
    assert text.startswith("wgrad: a context-parallel chunk of a micro-batch has 48 tokens")
    assert cuts(chunk_tokens=48, sites={"fprop"}) == []
    assert cuts(chunk_tokens=64) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_every_formats_own_blocks_are_kept_whole(options, kind):
    """An option for the block of mx formats does not hide the size that others have."""
    options(f'[asked]\nfprop = "{kind}"\n[quantizer]\nblock = 16\n')
    blocks = config.current().blocks()
    size = 16 if FORMATS[kind].is_mx else FORMATS[kind].block
    assert blocks == ({"fprop": size} if size else {})
    for part in (8, 16, 32, 64, 128, 192):
        layer = RowParallelLinear(2 * part, 2)
        found = [FoundLayer(Layer(FC2, "linear", "RowParallelLinear"), layer, layer)]
        faults = cut_blocks(blocks, {}, found, 0, lambda *_: False)
        assert bool(faults) == bool(size and part % size)


def test_squares_of_heads_are_refused_in_chunks_of_a_sequence():
    squares = {"dq.key": 128, "qk.query": 128}
    (fault,) = cut_blocks({}, squares, [], 256, lambda *_: False)
    assert fault.startswith("dq.key, qk.query: ") and "--context-parallel-size 1" in fault
    assert cut_blocks({}, squares, [], 0, lambda *_: False) == []
