"""Squares of attention's operands: every head alone, as a matrix."""

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.head_tiles import quantize_operand, tiles_of
from mqo.quant.spec import QuantSpec

SPEC = QuantSpec("int8_block", tile="square")
TOKENS, BATCH, HEADS = 150, 2, 3  # the second tile of a head is short


def spread(*shape):
    """Numbers whose tiles have different scales."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator) * torch.arange(1, shape[0] + 1).view(
        -1, *[1] * (len(shape) - 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_is_quantized_as_its_matrix_alone(dtype):
    key = spread(TOKENS, BATCH, HEADS, 32).to(dtype)
    found = quantize_operand(key, SPEC, "key", None, None)
    assert found.shape == key.shape
    for b in range(BATCH):
        for h in range(HEADS):
            alone = fake_quantize(key[:, b, h].contiguous(), SPEC)
            assert torch.equal(found[:, b, h], alone)
    flat = quantize_operand(key.flatten(1, 2), SPEC, "key", None, None)  # the unfused path's
    assert torch.equal(flat, found.flatten(1, 2))


def test_scores_are_matrices_already():
    probs = spread(BATCH * HEADS, TOKENS, TOKENS)
    found = quantize_operand(probs, SPEC, "probs", None, None)
    for one, matrix in zip(found, probs, strict=True):
        assert torch.equal(one, fake_quantize(matrix, SPEC))


def test_whole_tiles_are_measured():
    assert tiles_of(spread(TOKENS, BATCH, HEADS, 32), SPEC, "key").shape == (BATCH, HEADS, 256, 32)
    assert tiles_of(spread(6, 128, TOKENS), SPEC, "ds").shape == (6, 128, TOKENS)
