"""What the kinds of scales share and where they differ: reach, tiles, zeros, what is not finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant.formats import FORMATS
from mqo.quant.reference import qdq
from mqo.quant.scales import alpha_of, scales_of
from mqo.quant.spec import QuantSpec

from .tensors import every_kind, normal

SQUARE = [kind for kind, row in FORMATS.items() if row.square]
OF_TENSOR = [kind for kind, row in FORMATS.items() if row.needs_tensor_amax]


@every_kind
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_all_under_its_scale_nan(kind, special):
    x, spec = normal(3, 300), QuantSpec(kind)
    x[1, 140] = special
    result = qdq(x, spec)
    expected = torch.zeros(3, 300, dtype=torch.bool)
    if kind == "hifp8":
        expected[1, 140] = math.isnan(special)
    elif kind in OF_TENSOR:
        expected[:] = True
    else:
        first = 140 // spec.block * spec.block
        expected[1, first : first + spec.block] = True
    assert result.isnan().equal(expected)


@pytest.mark.parametrize("kind", SQUARE)
def test_what_is_not_finite_makes_its_square_nan(kind):
    block = FORMATS[kind].block
    x = normal(2 * block + 3, 2 * block + 5)
    x[block, block - 1] = math.inf
    result = qdq(x, QuantSpec(kind, tile="square")).isnan()
    if kind in OF_TENSOR:
        assert result.all()
    else:
        assert result.nonzero().tolist() == [
            [row, column] for row in range(block, 2 * block) for column in range(block)
        ]


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_squares_are_those_of_the_other_axes_by_the_blocks_axis(assert_same_bits, kind, axis):
    x = normal(9, 20, 37) * torch.exp(3 * normal(9, 20, 37, seed=1))
    spec = QuantSpec(kind, tile="square")
    rows = x.movedim(axis, -1)
    matrix = rows.reshape(-1, rows.shape[-1])
    expected = qdq(matrix, spec).reshape(rows.shape).movedim(-1, axis)
    assert_same_bits(qdq(x, spec, axis), expected)
    assert_same_bits(qdq(matrix, spec, 0), qdq(matrix, spec))
    assert not qdq(matrix, QuantSpec(kind)).equal(qdq(matrix, spec))


@pytest.mark.parametrize("kind", SQUARE)
def test_a_square_whose_rows_have_one_amax_is_quantized_as_its_rows(assert_same_bits, kind):
    x = normal(150, 260).clamp(-3, 3)
    x[:, :: FORMATS[kind].block] = 3.5
    assert_same_bits(qdq(x, QuantSpec(kind, tile="square")), qdq(x, QuantSpec(kind)))


@pytest.mark.parametrize("kind", OF_TENSOR)
def test_the_amax_of_a_larger_tensor_makes_its_part_what_it_is_there(assert_same_bits, kind):
    x = normal(6, 64)
    x[5, 3] = 100.0
    whole, part = qdq(x, QuantSpec(kind)), x[:4].clone()
    assert_same_bits(qdq(part, QuantSpec(kind), amax=x.abs().max()), whole[:4])
    assert not qdq(part, QuantSpec(kind)).equal(whole[:4])


@every_kind
def test_zeros_become_zeros_and_nothing_stays_nothing(kind):
    for x in (torch.zeros(4, 200), torch.zeros(0, 8), torch.zeros(8, 0)):
        assert qdq(x, QuantSpec(kind)).equal(x)


@pytest.mark.parametrize(
    "kind", ["nvfp4", "hif4", "fp8_tensor_e4m3", "fp8_tensor_e5m2", "fp8_block_fp32", "ufp4"]
)
def test_no_finite_magnitude_of_float16_becomes_infinite(kind):
    # The largest thousand, alone in a tensor each.
    x = torch.arange(0x7C00 - 1000, 0x7C00).to(torch.int16).view(torch.float16)
    assert all(qdq(one, QuantSpec(kind)).isfinite() for one in x.reshape(-1, 1))


def test_fp8_block_leaves_the_range_of_float16_from_63488_on():
    x = torch.arange(0x7C00).to(torch.int16).view(torch.float16).unsqueeze(1)
    assert qdq(x, QuantSpec("fp8_block")).isinf().equal(x >= 63488)


@pytest.mark.parametrize("kind", OF_TENSOR)
@settings(deadline=None, derandomize=True)
@given(st.floats(0, width=32) | st.floats(2.0**-149, 2.0**-126, width=32))
def test_alpha_is_the_stored_scale_of_the_tensor(kind, amax):
    stored = scales_of(torch.tensor([amax]), QuantSpec(kind)).stored.tensor.item()
    assert alpha_of(amax, QuantSpec(kind)) == (1.0 if math.isnan(stored) else stored)


@settings(deadline=None, derandomize=True)
@given(st.floats(0, width=32) | st.floats(2.0**-149, 2.0**-126, width=32))
def test_alpha_of_hifp8_is_the_power_of_two_of_the_tensor(amax):
    spec = QuantSpec("hifp8", tensor_scale=True)
    assert alpha_of(amax, spec) == scales_of(torch.tensor([amax]), spec).decode.item()
    assert alpha_of(amax, QuantSpec("hifp8")) == 1.0


@pytest.mark.parametrize("kind", OF_TENSOR)
def test_without_alpha_a_value_that_is_not_finite_is_nan(kind):
    spec = QuantSpec(kind, without_alpha=True)
    assert qdq(torch.tensor([[1.0, math.inf]]), spec).isnan().all()
    assert alpha_of(math.inf, spec) == alpha_of(math.nan, spec) == 1.0


def test_a_format_without_a_scale_of_the_tensor_has_no_alpha_to_exclude():
    kinds = {kind for kind in FORMATS if QuantSpec(kind, without_alpha=True).without_alpha}
    assert kinds == {*OF_TENSOR}
    assert QuantSpec("mxfp8", without_alpha=True) == QuantSpec("mxfp8")
