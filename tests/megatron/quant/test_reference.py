"""What all quantisers of the reference share: arguments, layout, gradients, determinism."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.quant import BLOCK_SIZES, SCALE_RULES, quantise_dequantise

QUANTISED_TYPES = ("mxfp8", "mxfp4", "mxfp8_e5m2", "hifp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def tensors(draw):
    """A tensor of some shape (empty ones too), dtype and layout, and one of its axes."""
    shape = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    dtype = draw(st.sampled_from(DTYPES))
    # Spread over binades, so that blocks differ in scale.
    x = normal(*(2 * size for size in shape), seed=draw(st.integers(0, 99)))
    x = (x * torch.exp(2 * normal(*x.shape, seed=1))).to(dtype)
    x = x[tuple(slice(None, None, 2) for _ in shape)] if draw(st.booleans()) else x
    return x.permute(draw(st.permutations(range(len(shape))))), axis


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tensors(),
    st.sampled_from(QUANTISED_TYPES),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(SCALE_RULES),
)
def test_an_axis_is_the_last_one_moved(assert_same_bits, tensor_and_axis, kind, block, rule):
    x, axis = tensor_and_axis
    before = x.clone()
    moved = x.movedim(axis, -1).contiguous()
    expected = quantise_dequantise(moved, kind, block=block, scale_rule=rule).movedim(-1, axis)
    actual = quantise_dequantise(x, kind, axis=axis, block=block, scale_rule=rule)
    assert_same_bits(actual, expected)
    assert_same_bits(x, before)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tensors(),
    st.sampled_from(QUANTISED_TYPES),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(SCALE_RULES),
)
def test_each_block_is_quantised_as_if_alone(assert_same_bits, tensor_and_axis, kind, block, rule):
    x, axis = tensor_and_axis
    alone = [
        quantise_dequantise(part, kind, axis=axis, block=block, scale_rule=rule)
        for part in x.split(block, dim=axis)
    ]
    whole = quantise_dequantise(x, kind, axis=axis, block=block, scale_rule=rule)
    assert_same_bits(whole, torch.cat(alone, dim=axis))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tensors(), st.sampled_from(QUANTISED_TYPES), st.sampled_from(SCALE_RULES))
def test_quantising_twice_changes_nothing(assert_same_bits, tensor_and_axis, kind, rule):
    # Rounding never moves a block's amax so far that the second scale's grid lacks the first's
    # values. It does not hold where rounding up overflows the dtype: Inf there, then NaN.
    x, axis = tensor_and_axis
    once = quantise_dequantise(x, kind, axis=axis, scale_rule=rule)
    assert once.isfinite().all()
    assert_same_bits(quantise_dequantise(once, kind, axis=axis, scale_rule=rule), once)


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_result_is_a_new_tensor_of_the_same_dtype_shape_and_strides(kind, dtype, axis):
    x = normal(36, 70, dtype=dtype).t()
    result = quantise_dequantise(x, kind, axis=axis)
    assert result is not x
    assert (result.dtype, result.shape, result.stride()) == (x.dtype, x.shape, x.stride())
    assert not result.equal(x)


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
def test_an_expanded_tensor_is_quantised_like_its_copy(kind):
    x = normal(1, 64).expand(3, 64)
    assert quantise_dequantise(x, kind).equal(quantise_dequantise(x.clone(), kind))


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
def test_the_sign_of_the_input_is_the_sign_of_the_result(kind):
    x = normal(4, 64)
    assert quantise_dequantise(-x, kind).equal(-quantise_dequantise(x, kind))


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
def test_bfloat16_gives_what_its_float32_copy_gives(kind):
    x = normal(8, 96, dtype=torch.bfloat16)
    wide = quantise_dequantise(x.float(), kind)
    assert quantise_dequantise(x, kind).float().equal(wide)


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
def test_the_result_carries_no_gradient(kind):
    x = normal(4, 32).requires_grad_()
    assert not quantise_dequantise(x, kind).requires_grad


def test_none_returns_the_very_same_object():
    for x in (normal(3, 5), torch.arange(4)):
        assert quantise_dequantise(x, "none") is x


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64])
def test_other_dtypes_are_refused(kind, dtype):
    valid = re.escape("valid: torch.float32, torch.bfloat16, torch.float16")
    with pytest.raises(TypeError, match=valid):
        quantise_dequantise(torch.zeros(4, dtype=dtype), kind)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"quant_type": "fp8"}, "'fp8'; valid: none, mxfp8, mxfp4, hifp8, mxfp8_e5m2"),
        ({"axis": 2}, "axis 2; valid: -2, -1, 0, 1"),
        ({"axis": -3}, "axis -3; valid: -2, -1, 0, 1"),
        ({"block": 24}, "block size 24; valid: 16, 32, 64, 128"),
        ({"scale_rule": "round"}, "'round'; valid: floor, rceil, ceil, even"),
        ({"overflow": "wrap"}, "'wrap'; valid: saturate, inf"),
    ],
)
def test_an_unknown_argument_is_refused_and_the_valid_ones_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        quantise_dequantise(torch.zeros(4, 4), **{"quant_type": "mxfp8", **arguments})


def test_a_scalar_has_no_axis_for_blocks():
    with pytest.raises(ValueError, match="axis -1"):
        quantise_dequantise(torch.tensor(1.0), "mxfp8")
    assert quantise_dequantise(torch.tensor(1.06), "hifp8") == 1.0
