"""The mx reference against other people's, torchao and ml_dtypes, and where torchao differs.

The oracles are imported outright: a test run without them fails.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from mqo.quant.codes import code_values
from mqo.quant.formats import BLOCK_SIZES
from mqo.quant.packing import pack
from mqo.quant.reference import qdq
from mqo.quant.spec import QuantSpec
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

TORCHAO_ELEMENTS = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp4": torch.float4_e2m1fn_x2,
}
NUMPY_ELEMENTS = {
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}
MODES = {mode.value: mode for mode in ScaleCalculationMode}
PATTERNS = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)

every_kind = pytest.mark.parametrize("kind", TORCHAO_ELEMENTS)
every_rule = pytest.mark.parametrize("rule", MODES)


def torchao_mx(x, kind, rule, block=32):
    """torchao's codes, scale bytes, and dequantized values."""
    element = TORCHAO_ELEMENTS[kind]
    scales, codes = to_mx(x, element, block, MODES[rule])
    values = to_dtype(codes, scales, element, block, x.dtype)
    return codes.view(torch.uint8), scales.view(torch.uint8), values


def spread_data(dtype):
    """Rows over many binades, and of short significands, which make ties."""
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(256, 256, generator=generator)
    x *= 2.0 ** torch.randint(-60, 60, (256, 1), generator=generator)
    ties = torch.randint(-63, 64, (256, 256), generator=generator).float()
    ties *= 2.0 ** torch.randint(-9, 1, (256, 256), generator=generator)
    return torch.cat((x, ties)).to(dtype)


# -- torchao -----------------------------------------------------------------------------------


@every_kind
@every_rule
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_gives_the_same_codes_scales_and_values(assert_same_bits, kind, rule, block, dtype):
    x = spread_data(dtype)
    codes, scales, values = torchao_mx(x, kind, rule, block)
    packed = pack(x, QuantSpec(kind, block, rule))
    nonzero = (
        packed.scales.block != 0
    )  # of a block of zeros, to which torchao may give another scale
    assert packed.codes.equal(codes)
    assert packed.scales.block[nonzero].equal(scales[nonzero])
    assert_same_bits(packed.unpack(), values)


@every_kind
@every_rule
def test_torchao_agrees_on_every_bfloat16_pattern_but_at_the_smallest_scale(
    assert_same_bits, kind, rule
):
    # Each pattern is the only one of its block; Inf and NaN, and scale byte 0, are below.
    x = torch.zeros(2**16, 32, dtype=torch.bfloat16)
    x[:, 0] = PATTERNS
    packed = pack(x, QuantSpec(kind, scale_rule=rule))
    usual = (packed.scales.block[:, 0] != 0) & PATTERNS.isfinite()
    assert usual.sum() > 60_000
    values = torchao_mx(x[usual], kind, rule)[2]
    assert_same_bits(packed.unpack()[usual], values)


@every_kind
@every_rule
def test_torchao_halves_what_has_the_smallest_scale_or_loses_it_under_rceil(kind, rule):
    # It divides by 2^-126 and multiplies by 2^-127.
    x = torch.full((1, 32), 2.0**-127)
    _, scales, values = torchao_mx(x, kind, rule)
    assert scales.tolist() == [[0]]
    assert values.eq(0.0 if rule == "rceil" else 2.0**-128).all()
    assert qdq(x, QuantSpec(kind, scale_rule=rule)).equal(x)


@every_kind
@every_rule
def test_torchao_lets_an_infinity_keep_its_block_finite(kind, rule):
    x = torch.ones(1, 32)
    x[0, 3] = math.inf
    values = torchao_mx(x, kind, rule)[2]
    assert values[0, 0] == 0.0
    assert values[0, 3] == math.inf
    assert qdq(x, QuantSpec(kind, scale_rule=rule)).isnan().all()


@every_kind
@every_rule
def test_torchao_makes_a_block_with_nan_nan(kind, rule):
    x = torch.ones(1, 64)
    x[0, 3] = math.nan
    values = torchao_mx(x, kind, rule)[2]
    assert values.isnan().equal(qdq(x, QuantSpec(kind, scale_rule=rule)).isnan())
    assert values[0, :32].isnan().all()


# -- ml_dtypes: elements and scales ------------------------------------------------------------


@every_kind
def test_ml_dtypes_decodes_every_code_alike(kind):
    values = np.array(code_values(kind))
    codes = np.arange(len(values), dtype=np.uint8).view(NUMPY_ELEMENTS[kind])
    assert np.array_equal(codes.astype(np.float64), values, equal_nan=True)


@every_kind
def test_ml_dtypes_rounds_every_bfloat16_pattern_within_range_alike(kind):
    # The block's scale is 1, by its first value; floor clips only what lies beyond the largest.
    largest = max(value for value in code_values(kind) if math.isfinite(value))
    patterns = PATTERNS[PATTERNS.abs() <= largest]
    x = torch.zeros(len(patterns), 32, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = largest, patterns
    ours = qdq(x, QuantSpec(kind))[:, 1].float().numpy()
    theirs = patterns.float().numpy().astype(NUMPY_ELEMENTS[kind]).astype(np.float32)
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_ml_dtypes_decodes_every_scale_alike():
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    ours = [2.0 ** (byte - 127) for byte in range(255)]
    assert np.array_equal(scales, np.array([*ours, math.nan]), equal_nan=True)
