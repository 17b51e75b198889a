import pytest
import torch
from mqo.megatron.attention.fused import fused_attention

from .conftest import largest, written_out

SCALE = 0.3
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
SHAPES = {
    "plain": {},
    "grouped": {"groups": 2},
    "one group": {"groups": 1},
    "a narrow value": {"value_width": 8},
    "a wide value": {"value_width": 24},
    "grouped, narrow": {"groups": 2, "value_width": 8},
    "odd sizes": {"sq": 37, "sk": 37, "width": 12, "value_width": 7},
}


def error(actual, expected):
    """The largest deviation, relative to the largest element of what is expected."""
    return ((actual.double() - expected.double()).abs().max() / expected.abs().max()).item()


def gradients(context, tensors):
    weights = torch.linspace(-1, 1, context.numel()).reshape(context.shape)
    return torch.autograd.grad((context.double() * weights).sum(), tensors)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_context_and_gradients_are_those_of_the_definition(operands, shape, dtype):
    tensors = operands(**shape, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    context = fused_attention(*tensors, scale=SCALE, causal=True)
    expected = written_out(*exact, SCALE)
    assert context.dtype == dtype
    assert context.shape == expected.shape
    assert error(context, expected) < TOLERANCES[dtype]
    found = gradients(context, tensors)
    for gradient, right in zip(found, gradients(expected, exact), strict=True):
        assert error(gradient, right) < 3 * TOLERANCES[dtype]


def test_without_causality_every_key_counts(operands):
    tensors = operands(sq=1, sk=33, groups=2)
    context = fused_attention(*tensors, scale=SCALE, causal=False)
    assert error(context, written_out(*tensors, SCALE, causal=False)) < 1e-5


def test_tensors_in_any_layout_will_do(operands):
    query, key, value = operands()
    joined = torch.cat([query, key, value], dim=-1)
    context = fused_attention(*joined.split(16, dim=-1), scale=SCALE, causal=True)
    assert torch.equal(context, fused_attention(query, key, value, scale=SCALE, causal=True))


@pytest.mark.parametrize("shape", [{}, {"groups": 1, "value_width": 8}], ids=str)
def test_no_tensor_grows_with_the_square_of_the_sequence(operands, shape):
    length = 512
    tensors = operands(sq=length, sk=length, **shape)
    with largest() as seen:
        fused_attention(*tensors, scale=SCALE, causal=True).sum().backward()
    # The largest are the operands, of 2 x 4 heads; a mask alone would be larger.
    assert seen.elements == 2 * 4 * length * 16 < length * length
    with largest() as seen:
        written_out(*tensors, SCALE).sum().backward()
    assert seen.elements == 2 * 4 * length * length


def test_no_kernel_is_an_error_and_no_silent_fallback(operands):
    with pytest.raises(RuntimeError, match="No available kernel"):
        fused_attention(*operands(), scale=SCALE, causal=True, dropout=0.1)
