"""The MX reference against stored vectors, an exact scalar implementation, and its own laws."""

import bisect
import itertools
import math
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mqo.quant import stochastic
from mqo.quant.formats import ROUNDINGS
from mqo.quant.reference import qdq
from mqo.quant.spec import QuantSpec

from .mx import MX_ELEMENTS, MX_RULES

VECTORS = np.load(Path(__file__).parents[2] / "vectors" / "mx_vectors.npz")
RULES = {
    "floor": "ocp_exact_floor_rne",
    "rceil": "exact_rceil_rne",
    "ceil": "exact_ceil_rne",
    "even": "exact_even_rne",
}
CASES = ("normal", "tie_grid", "special_blocks", "normal_bf16")
KINDS = tuple(MX_ELEMENTS)
every_kind = pytest.mark.parametrize("kind", KINDS)
# A format may be younger than the vectors.
STORED = [kind for kind in KINDS if f"exact_even_rne__{MX_ELEMENTS[kind].name}__normal" in VECTORS]
every_stored_kind = pytest.mark.parametrize("kind", STORED)
every_rule = pytest.mark.parametrize("rule", MX_RULES)


def vector(kind, rule, case):
    key = f"{RULES[rule]}__{MX_ELEMENTS[kind].name}__{case}"
    return torch.from_numpy(VECTORS[f"in__{case}"]), torch.from_numpy(VECTORS[key])


@every_stored_kind
@every_rule
@pytest.mark.parametrize("case", CASES)
def test_vectors_bit_for_bit(assert_same_bits, kind, rule, case):
    x, expected = vector(kind, rule, case)
    assert_same_bits(qdq(x, QuantSpec(kind, scale_rule=rule)), expected)


def test_every_vector_is_used():
    used = {
        f"{source}__{MX_ELEMENTS[kind].name}__{case}"
        for source, kind, case in itertools.product(RULES.values(), STORED, CASES)
    }
    assert used | {f"in__{case}" for case in CASES} == set(VECTORS.files)


# An implementation by search, in exact fractions: the values of all codes, in order.


# Of each element: its exponent bits, its mantissa bits, and how many codes are finite magnitudes.
MINIFLOATS = {
    "e4m3": (4, 3, 0x7F),
    "e5m2": (5, 2, 0x7C),
    "e3m2": (3, 2, 32),
    "e2m3": (2, 3, 32),
    "e2m1": (2, 1, 8),
    "int8": (1, 6, 128),  # m/64 and 1 + m/64
}


def with_zeros_of(kind, x):
    """`x`, whose zeros lose their signs where the format's zero has none."""
    return x.where(x != 0, 0.0) if kind == "mxint8" else x


def code_values(kind):
    """All non-negative finite values by code; a code's last bit is its mantissa's, so its parity
    decides ties."""
    exponent_bits, mantissa_bits, codes = MINIFLOATS[MX_ELEMENTS[kind].name]
    bias = max(1, 2 ** (exponent_bits - 1) - 1)
    values = []
    for code in range(codes):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = Fraction(mantissa, 2**mantissa_bits) + (exponent > 0)
        values.append(fraction * Fraction(2) ** (max(exponent, 1) - bias))
    return values


CODE_VALUES = {kind: code_values(kind) for kind in KINDS}


def rounded(value, values, rounding, draw):
    """The value of `values` that `value` becomes; the largest one for anything beyond."""
    upper = bisect.bisect_right(values, value)
    if upper == len(values):
        return values[-1]
    lower = upper - 1
    share = (value - values[lower]) / (values[upper] - values[lower])
    goes_up = {
        "nearest-even": share > Fraction(1, 2) or (share == Fraction(1, 2) and lower % 2),
        "nearest-away": share >= Fraction(1, 2),
        "stochastic": draw < math.floor(share * 2**24),
    }
    return values[upper if goes_up[rounding] else lower]


def scale(amax, kind, rule):
    largest = CODE_VALUES[kind][-1]
    mantissa_bits = MINIFLOATS[MX_ELEMENTS[kind].name][1]

    def exponent(fits):  # the largest exponent that `fits`
        return max(k for k in range(-170, 140) if fits(Fraction(2) ** k))

    emax = exponent(lambda power: power <= largest)
    if rule == "rceil":
        k = exponent(lambda power: amax > largest * power) + 1
    elif rule == "ceil":
        k = exponent(lambda power: power < amax) + 1 - emax
    else:
        k = exponent(lambda power: power <= amax)
        if rule == "even":
            step = Fraction(2) ** (k - mantissa_bits)
            rounded = math.floor(amax / step + Fraction(1, 2)) * step
            k = exponent(lambda power: power <= rounded)
        k -= emax
    return Fraction(2) ** min(max(k, -127), 127)


def to_float32(fraction):
    return math.inf if fraction >= Fraction(2) ** 128 else float(fraction)


def quantize_block_slowly(block, kind, rule, rounding="nearest-even", draws=None):
    if not all(map(math.isfinite, block)):
        return [math.nan] * len(block)
    amax = max(abs(Fraction(v)) for v in block)
    if amax == 0:
        return list(block)
    unit = scale(amax, kind, rule)
    magnitudes = [
        rounded(abs(Fraction(v)) / unit, CODE_VALUES[kind], rounding, draw) * unit
        for v, draw in zip(block, draws or [0] * len(block), strict=True)
    ]
    return [math.copysign(to_float32(m), v) for m, v in zip(magnitudes, block, strict=True)]


def float32(pattern):
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


patterns = st.integers(0, 2**32 - 1).map(float32)
# Few mantissa bits in nearby binades: full of ties.
near_ties = st.builds(
    lambda m, e, s: s * m * 2.0**e,
    st.integers(0, 63),
    st.integers(-11, 0),
    st.sampled_from((1, -1)),
)
subnormals = st.integers(0, 2**24).map(float32)
blocks = st.one_of(
    *(st.lists(v, min_size=1, max_size=16) for v in (patterns, near_ties, subnormals))
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(blocks)
@example([float32(0x7F7FFFFF), 1.0, -(2.0**127)])
@example([2.0**-149, 2.0**-127, -(2.0**-126)])
@example([448.0, 448.0 + 2**-15, -464.0])
@example([224.0, 223.0])
@every_kind
@every_rule
def test_a_block_equals_the_search_over_all_codes(assert_same_bits, kind, rule, block):
    x = torch.tensor(block, dtype=torch.float32)
    expected = torch.tensor(quantize_block_slowly(block, kind, rule), dtype=torch.float32)
    expected = with_zeros_of(kind, expected)
    assert_same_bits(qdq(x, QuantSpec(kind, scale_rule=rule)), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(blocks, st.integers(0, 2**64 - 1))
@example([448.0, 1.0, 2.0**-10, -3.0], 0)
@every_kind
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_each_rounding_equals_the_search(assert_same_bits, kind, rounding, block, seed):
    x = torch.tensor(block, dtype=torch.float32)
    draws = stochastic.draws(x.shape, seed).tolist()
    expected = quantize_block_slowly(block, kind, "floor", rounding, draws)
    actual = qdq(x, QuantSpec(kind, rounding=rounding), seed=seed)
    expected = with_zeros_of(kind, torch.tensor(expected, dtype=torch.float32))
    assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("mxfp8", 63488.0),
        ("mxfp8_e5m2", 61440.0),
        ("mxfp4", 57344.0),
        ("mxfp6_e2m3", 63488.0),
        ("mxfp6_e3m2", 61440.0),
    ],
)
def test_rounding_up_may_leave_the_range_of_float16(kind, first):
    # Every positive finite float16, each in a block of its own.
    x = torch.arange(0x7C00).to(torch.int16).view(torch.float16).unsqueeze(1)
    assert qdq(x, QuantSpec(kind, scale_rule="floor")).isfinite().all()
    for rule in ("rceil", "ceil", "even"):
        result = qdq(x, QuantSpec(kind, scale_rule=rule))
        assert result.isinf().equal(x >= first)
        exact = qdq(x.float(), QuantSpec(kind, scale_rule=rule))
        assert result.float().equal(exact.masked_fill(x >= first, math.inf))
        assert exact[x >= first].eq(65536).all()


# -- exhaustively, in NumPy: all bfloat16 patterns, under every scale --------------------------

PATTERNS = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
POSITIVE = PATTERNS[:0x7F80].double().numpy()  # 0, and every finite positive one


def on_the_grid(magnitudes, kind, rounding):
    """The element values next to float64 `magnitudes`, by the midpoints between neighbors."""
    values = np.array(CODE_VALUES[kind], dtype=np.float64)
    midpoints = (values[:-1] + values[1:]) / 2
    above = np.searchsorted(midpoints, magnitudes, side="right")
    if rounding == "nearest-even":
        # Where the sides differ, a magnitude is a midpoint: of two neighbors take the even code.
        below = np.searchsorted(midpoints, magnitudes, side="left")
        above = np.where(above % 2, below, above)
    return values[above]


def floor_exponents(kind):
    """Per scale exponent k: the patterns that may stand in a block with it, and one that must."""
    emax = MX_ELEMENTS[kind].emax
    for k in range(-127, 128 - emax):
        yield k, POSITIVE[2.0 ** (k + emax + 1) > POSITIVE], 2.0 ** (k + emax)


@every_kind
@pytest.mark.parametrize("rounding", ["nearest-even", "nearest-away"])
def test_every_pattern_under_every_scale(kind, rounding):
    # Rows of 16: one value that gives the block its scale, then 15 patterns.
    spec, pairs = QuantSpec(kind, block=16, rounding=rounding), 0
    for k, patterns, amax in floor_exponents(kind):
        rows = np.full((-(-len(patterns) // 15), 16), amax)
        body = np.resize(patterns, (len(rows), 15))
        rows[:, 1:] = body
        rows[:, 1::2] *= -1
        actual = qdq(torch.from_numpy(rows).bfloat16(), spec).double().numpy()
        exact = on_the_grid(body * 2.0**-k, kind, rounding) * 2.0**k
        assert np.array_equal(np.abs(actual[:, 1:]), exact)
        signs = np.signbit(rows) & ((kind != "mxint8") | (actual != 0))
        assert np.array_equal(np.signbit(actual), signs)
        pairs += len(patterns)
    assert pairs > 4_000_000


@every_kind
@every_rule
def test_every_pattern_alone_in_its_block(assert_same_bits, kind, rule):
    powers = np.arange(-160.0, 160.0)
    largest = float(CODE_VALUES[kind][-1])
    emax, mantissa_bits = MX_ELEMENTS[kind].emax, MX_ELEMENTS[kind].mantissa_bits
    significand, exponent = np.frexp(POSITIVE)  # 0.5 <= significand < 1
    carries = np.floor(significand * 2 ** (mantissa_bits + 1) + 0.5) == 2 ** (mantissa_bits + 1)
    k = {
        "floor": exponent - 1 - emax,
        "rceil": powers[np.searchsorted(largest * 2.0**powers, POSITIVE)],
        "ceil": powers[np.searchsorted(2.0**powers, POSITIVE)] - emax,
        "even": exponent - 1 + carries - emax,
    }[rule]
    unit = 2.0 ** np.clip(k, -127, 127)
    expected = torch.from_numpy(on_the_grid(POSITIVE / unit, kind, "nearest-even") * unit)
    expected = torch.cat((expected, torch.full((0x80,), math.nan, dtype=torch.float64)))
    expected = with_zeros_of(kind, torch.cat((expected, -expected)).bfloat16())
    spec = QuantSpec(kind, scale_rule=rule)
    assert_same_bits(qdq(PATTERNS.unsqueeze(1), spec).squeeze(1), expected)
