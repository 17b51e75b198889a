"""The HiFloat8 reference against stored vectors and a search over all its codes."""

import bisect
import functools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from mqo.quant import stochastic
from mqo.quant.formats import ROUNDINGS
from mqo.quant.reference import qdq
from mqo.quant.spec import QuantSpec

VECTORS = np.load(Path(__file__).parents[2] / "vectors" / "hif8_vectors.npz")


def decode(code):
    """The value of a code, read field by field (arXiv 2409.16626, table 1)."""
    if code in (0x00, 0x80):
        return math.nan if code else 0.0
    if code in (0x6F, 0xEF):
        return math.inf if code == 0x6F else -math.inf
    sign = -1.0 if code & 0x80 else 1.0
    bits = f"{code & 0x7F:07b}"
    if bits.startswith("0000"):
        return sign * 2.0 ** (int(bits[4:], 2) - 23)
    # The prefix says how many bits the exponent has.
    prefix, width = next(
        (prefix, width)
        for prefix, width in (("0001", 0), ("001", 1), ("01", 2), ("10", 3), ("11", 4))
        if bits.startswith(prefix)
    )
    field, mantissa = bits[len(prefix) :][:width], bits[len(prefix) + width :]
    exponent = int("1" + field[1:], 2) * (-1 if field[0] == "1" else 1) if width else 0
    return sign * 2.0**exponent * (1 + int(mantissa, 2) / 2 ** len(mantissa))


DECODED = [decode(code) for code in range(256)]
MAGNITUDES = sorted({value for value in DECODED if 0 <= value < math.inf})
# Infinity's code stands where 1.5 * 2^15 would.
STEPS = [Fraction(value) for value in MAGNITUDES] + [Fraction(1.5 * 2**15)]


# A tie to even goes to the even code; of Infinity's place, to that of Infinity, which is odd.
STEP_CODES = [DECODED.index(value) for value in (*MAGNITUDES, math.inf)]


def goes_up(share, code, rounding, draw):
    if rounding == "nearest-even":
        return share > Fraction(1, 2) or (share == Fraction(1, 2) and code % 2 == 1)
    if rounding == "nearest-away":
        return share >= Fraction(1, 2)
    return draw < math.floor(share * 2**24)


@functools.cache
def place_of(magnitude):
    """The index of the largest step up to it, and the share of the way to the next one."""
    if math.isinf(magnitude):
        return len(STEPS) - 1, Fraction(0)
    index = bisect.bisect_right(STEPS, magnitude := Fraction(magnitude)) - 1
    if index == len(STEPS) - 1:
        return index, Fraction(0)
    return index, (magnitude - STEPS[index]) / (STEPS[index + 1] - STEPS[index])


def quantize_slowly(value, overflow, rounding="nearest-away", draw=0):
    """One of the two neighbors among all codes' values, by search."""
    if math.isnan(value):
        return math.nan
    index, share = place_of(abs(value))
    index += goes_up(share, STEP_CODES[index], rounding, draw)
    if index == 0:
        return 0.0
    limit = MAGNITUDES[-1] if overflow == "saturate" else math.inf
    return math.copysign(MAGNITUDES[index] if index < len(MAGNITUDES) else limit, value)


def test_the_code_table_is_that_of_the_vectors():
    assert VECTORS["codes"].tolist() == list(range(256))
    assert np.array_equal(VECTORS["code_values"], np.float32(DECODED), equal_nan=True)


@pytest.mark.parametrize(
    ("overflow", "key"), [("inf", "ta_inf_edges"), ("saturate", "ta_sat_edges")]
)
def test_vectors_bit_for_bit(assert_same_bits, overflow, key):
    x = torch.from_numpy(VECTORS["in_edges"])
    expected = torch.from_numpy(VECTORS[key])
    assert_same_bits(qdq(x, QuantSpec("hifp8", overflow=overflow)), expected)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_equals_the_search(assert_same_bits, dtype, rounding, overflow):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    draws = stochastic.draws(x.shape, 21).tolist()
    searched = [
        quantize_slowly(value, overflow, rounding, draw)
        for value, draw in zip(x.tolist(), draws, strict=True)
    ]
    spec = QuantSpec("hifp8", rounding=rounding, overflow=overflow)
    assert_same_bits(qdq(x, spec, seed=21), torch.tensor(searched).to(dtype))


def test_codes_along_the_grid_are_even_and_odd_in_turn():
    assert [code % 2 for code in STEP_CODES] == [i % 2 for i in range(len(STEP_CODES))]


# -- the tensor scale --------------------------------------------------------------------------

SCALED = QuantSpec("hifp8", tensor_scale=True)
PLAIN = QuantSpec("hifp8")


@pytest.mark.parametrize("amax", [1.0, 1.99, 2.0, 3e-7, 3e5, 7.1e37, 2.0**-120])
def test_the_tensor_scale_takes_amax_to_the_top_binade_of_three_mantissa_bits(
    assert_same_bits, amax
):
    x = torch.randn(40, 50)
    x = (x / x.abs().max() * amax).clamp(-amax, amax)
    scale = 2.0 ** (math.frexp(x.abs().max().item())[1] - 1 - 3)
    assert 8 <= x.abs().max() / scale < 16
    assert_same_bits(qdq(x, SCALED), qdq(x / scale, PLAIN) * scale)


@pytest.mark.parametrize("special", [0.0, math.inf, -math.inf, math.nan])
def test_without_a_finite_amax_the_tensor_scale_is_one(assert_same_bits, special):
    x = torch.full((4,), special)
    assert_same_bits(qdq(x, SCALED), qdq(x, PLAIN))
    x = torch.tensor([special, 1.0, -(2.0**-30)])
    if special:
        assert_same_bits(qdq(x, SCALED), qdq(x, PLAIN))


def test_the_tensor_scale_ends_at_the_smallest_of_a_byte():
    # 2^-140 would want 2^-143; with 2^-127 it is 2^-13, a power of two still.
    x = torch.tensor([2.0**-140, 1.75 * 2.0**-140])
    assert qdq(x, SCALED).tolist() == [2.0**-140, 2.0**-139]


def test_a_tensor_scale_may_round_up_beyond_float16():
    x = torch.tensor([65504.0, 1.0], dtype=torch.float16)
    assert qdq(x, SCALED).tolist() == [math.inf, 1.0]
    assert qdq(x, PLAIN).tolist() == [32768.0, 1.0]


def test_an_empty_tensor_has_a_scale_too():
    assert qdq(torch.empty(0, 3), SCALED).shape == (0, 3)
