"""What all quantizers of the reference share: layout, blocks, dtypes, idempotence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant.formats import BLOCK_SIZES, FORMATS, SCALE_RULES
from mqo.quant.reference import qdq
from mqo.quant.spec import QuantSpec

from .mx import MX_ELEMENTS
from .tensors import DTYPES, KINDS, every_dtype, every_kind, normal

# Their scales are powers of two, or they have none.
EXACT_TYPES = (*MX_ELEMENTS, "hifp8", "fp8_block")


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
    tensors(), st.sampled_from(KINDS), st.sampled_from(BLOCK_SIZES), st.sampled_from(SCALE_RULES)
)
def test_an_axis_is_the_last_one_moved(assert_same_bits, tensor_and_axis, kind, block, rule):
    x, axis = tensor_and_axis
    before = x.clone()
    moved = x.movedim(axis, -1).contiguous()
    expected = qdq(moved, QuantSpec(kind, block=block, scale_rule=rule)).movedim(-1, axis)
    actual = qdq(x, QuantSpec(kind, block=block, scale_rule=rule), axis=axis)
    assert_same_bits(actual, expected)
    assert_same_bits(x, before)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tensors(),
    st.sampled_from([kind for kind, row in FORMATS.items() if not row.needs_tensor_amax]),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(SCALE_RULES),
)
def test_each_block_is_quantized_as_if_alone(assert_same_bits, tensor_and_axis, kind, block, rule):
    x, axis = tensor_and_axis
    spec = QuantSpec(kind, block=block, scale_rule=rule)
    alone = [qdq(part, spec, axis=axis) for part in x.split(spec.block or block, dim=axis)]
    assert_same_bits(qdq(x, spec, axis=axis), torch.cat(alone, dim=axis))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tensors(), st.sampled_from(EXACT_TYPES), st.sampled_from(SCALE_RULES))
def test_quantizing_twice_changes_nothing(assert_same_bits, tensor_and_axis, kind, rule):
    # Rounding never moves a block's amax so far that the second scale's grid lacks the first's
    # values. It does not hold where rounding up overflows the dtype: Inf there, then NaN.
    x, axis = tensor_and_axis
    once = qdq(x, QuantSpec(kind, scale_rule=rule), axis=axis)
    assert once.isfinite().all()
    assert_same_bits(qdq(once, QuantSpec(kind, scale_rule=rule), axis=axis), once)


@every_kind
@every_dtype
@pytest.mark.parametrize("axis", [0, 1])
def test_the_result_is_a_new_tensor_of_the_same_dtype_shape_and_strides(kind, dtype, axis):
    x = normal(36, 70, dtype=dtype).t()
    result = qdq(x, QuantSpec(kind), axis=axis)
    assert result is not x
    assert (result.dtype, result.shape, result.stride()) == (x.dtype, x.shape, x.stride())
    assert not result.equal(x)


@every_kind
def test_an_expanded_tensor_is_quantized_like_its_copy(kind):
    x = normal(1, 64).expand(3, 64)
    assert qdq(x, QuantSpec(kind)).equal(qdq(x.clone(), QuantSpec(kind)))


@every_kind
def test_the_sign_of_the_input_is_the_sign_of_the_result(kind):
    x = normal(4, 64)
    assert qdq(-x, QuantSpec(kind)).equal(-qdq(x, QuantSpec(kind)))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_gives_what_its_float32_copy_gives_rounded(assert_same_bits, kind, dtype):
    x = normal(8, 96, dtype=dtype)
    wide = qdq(x.float(), QuantSpec(kind))
    assert_same_bits(qdq(x, QuantSpec(kind)), wide.to(dtype))
    if kind in EXACT_TYPES:
        assert wide.to(dtype).float().equal(wide)
