"""The arithmetic of the kernels, on vectors: scales and rounding of every format.

All formats use the same steps. A magnitude is multiplied by `up`, clamped to the largest element,
rounded to an element and multiplied by `down`; both factors depend on the amax of a block or of the
tensor. If an amax is NaN or infinite, `down` is NaN. The kernels do not flush subnormals
(`emit_normal_floats`), so float32 arithmetic equals the reference's, bit for bit.

Numbers are float32 patterns, and integers in units of 2^23, the unit of an exponent. CONSTANTS
lists the constants of a call:

    carry    e8m0: added to the pattern of amax, so that it rounds up by the scale rule
    emax     e8m0: of the element
    top      the pattern of the largest element
    floor    the pattern of the smallest normal element
    steps    23 - m, for an element with m mantissa bits
    first    tensor: its `up`; one-level, two-level: the factor of amax to a block's scale
    second   one-level, two-level: the factor of a block's scale
    third    tensor: its `down`; two-level: `second`; 1 if the result excludes alpha
    seed     for stochastic rounding
"""

import functools
from typing import NamedTuple

from llvmlite import ir

from mqo.quant.cpu.lanes import Lanes
from mqo.quant.formats import Minifloat
from mqo.quant.scales import ERROR_BITS, pattern

CONSTANTS = ("carry", "emax", "top", "floor", "steps", "first", "second", "third", "seed")

MAGNITUDE = 0x7FFFFFFF
EXPONENT = 0x7F800000  # and the pattern of Infinity
UNIT = 0x00800000  # one step of an exponent, and the bit that a normal number does not store
HALF = 0x00400000  # half of it, and the pattern of 2^-127
NAN = 0x7FC00000
LARGEST = 0x7F7FFFFF  # of finite numbers
ONE = 0x3F800000

_WORD = ir.IntType(32)
_TWO_TO_24 = 0x4B800000


class Scheme(NamedTuple):
    """The compile-time parameters of a kernel: kind of scale, rounding, and kind of element.

    block_scale: the element of the scales of blocks, for kinds that have a choice. error: 'mse' or
    'mae' if the error of a block chooses its scale.
    """

    scale: str
    rounding: str
    element: str  # "minifloat", "complement" or "tapered"
    block_scale: Minifloat | None = None
    error: str | None = None

    @property
    def has_amax(self) -> bool:
        """Whether the scales depend on the amax of blocks."""
        return self.scale not in ("none", "tensor")

    @property
    def groups(self) -> int:
        """The number of runs of a block with separate factors."""
        return 16 if self.scale == "hif4" else 1

    @property
    def exact(self) -> bool:
        """Whether the results for bfloat16 inputs are exact in bfloat16."""
        return self.scale not in ("fp32", "tensor", "two-level")  # one-level: 6 bits are enough


class Constants(NamedTuple):
    """The constants as scalars."""

    carry: Lanes
    emax: Lanes
    top: Lanes
    floor: Lanes
    steps: Lanes
    first: Lanes
    second: Lanes
    third: Lanes
    seed: ir.Value

    @classmethod
    def from_tuple(cls, builder: ir.IRBuilder, values: ir.Value) -> "Constants":
        """Unpack a kernel's tuple."""
        parts = [builder.extract_value(values, i) for i in range(len(CONSTANTS))]
        words = [scalar(builder, value) for value in parts[:-1]]
        return cls._make([*words, parts[-1]])

    def like(self, other: Lanes) -> "Constants":
        """Return them as vectors of other's type, except the seed."""
        return Constants._make([*(word.like(other) for word in self[:-1]), self.seed])


def scalar(builder: ir.IRBuilder, value: ir.Value) -> Lanes:
    """Return the low 32 bits of a 64-bit argument."""
    return Lanes(builder, builder.trunc(value, _WORD))


# -- scales ------------------------------------------------------------------------------------


def plan(scheme: Scheme, amax: Lanes, c: Constants) -> tuple[Lanes, Lanes]:
    """Return up and down; scales.py defines each kind."""
    if not scheme.has_amax:
        return c.first, c.third
    if scheme.block_scale is not None:
        scale = _block_scale(scheme, amax.times(c.first))
        up, down = _over(scale, c), scale.times(c.third)
    else:
        up, down = _FACTORS[scheme.scale](amax, c)
    return up, finite(amax, down)


def _e8m0(amax: Lanes, c: Constants) -> tuple[Lanes, Lanes]:
    # The fraction of a subnormal amax (only 2^-127 and above matter) begins one bit lower.
    amax = ((amax << 1) - UNIT).maximum(0).where(amax < UNIT, amax)
    scale = (((amax + c.carry) & EXPONENT) - c.emax).maximum(0).minimum(254 * UNIT)
    return _inverse_power(scale), scale.maximum(HALF)


def _fp32(amax: Lanes, c: Constants) -> tuple[Lanes, Lanes]:
    up = amax.constant(ONE).where(amax.equals(0), c.top.over(amax).minimum(LARGEST))
    return up, up.constant(ONE).over(up)


_FACTORS = {
    "e8m0": _e8m0,
    "fp32": _fp32,
}


def _block_scale(scheme: Scheme, scaled: Lanes) -> Lanes:
    """Round to the element of the scales of blocks."""
    element = scheme.block_scale
    assert element is not None
    scaled = scaled.minimum(pattern(element.max_value))
    power = (scaled & EXPONENT).maximum(pattern(2.0**element.emin))
    return scaled.round_off((power + (23 - element.mantissa_bits) * UNIT) | HALF)


def _over(scale: Lanes, c: Constants) -> Lanes:
    """Return the `up` of blocks with this scale."""
    return scale.constant(ONE).over(scale.times(c.second)).minimum(LARGEST)


# -- four over six: the scale of a block with the smaller error ------------------------------------


# The last bit of a sum with 2^(23 - ERROR_BITS) is the unit of errors.
ANCHOR = pattern(2.0 ** (23 - ERROR_BITS))


def candidates(scheme: Scheme, amax: Lanes, factor: Lanes, c: Constants) -> tuple[Lanes, Lanes]:
    """Return the scales of blocks with this amax, times a factor before they round, and `up`."""
    scale = _block_scale(scheme, amax.times(c.first).times(factor))
    return scale, _over(scale, c)


def rounded_with_error(
    scheme: Scheme, part: Lanes, up: Lanes, c: Constants, is_four: bool
) -> tuple[Lanes, Lanes]:
    """Return the rounded elements, and ANCHOR plus their errors in whole units.

    Errors beyond 16 units of the scale are meaningless, but then both scales are equal, or the
    first is 0. Otherwise the scale that maps to 4 maps nothing beyond 6.
    """
    steps = part.times(up)
    scaled = steps if is_four else steps.minimum(c.top)
    rounded = scaled.round_off((scaled & EXPONENT).maximum(c.floor) + c.steps)
    off = rounded.minus(steps)
    off = off.times(off) if scheme.error == "mse" else off & MAGNITUDE
    return rounded, off.plus(off.constant(ANCHOR))


def takes_four(scheme: Scheme, scales: tuple[Lanes, Lanes], errors: tuple[Lanes, Lanes]) -> Lanes:
    """Return the mask of blocks whose second scale has a smaller sum of errors, in units."""
    six, four = scales
    of_six, of_four = (
        error.float().times(scale if scheme.error == "mae" else scale.times(scale))
        for error, scale in zip(errors, scales, strict=True)
    )
    # Elements over a scale of 0 have no error in its units.
    return ((of_four < of_six) | six.equals(0)) & (six < four)


def finite(amax: Lanes, down: Lanes) -> Lanes:
    """Return `down`, or NaN where amax is not finite."""
    return amax.constant(NAN).where(amax > EXPONENT - 1, down)


def _inverse_power(pattern: Lanes) -> Lanes:
    """Return 2^-e for the pattern of 2^e; the pattern 0 means 2^-127."""
    return (pattern.constant(254 * UNIT) - pattern).maximum(HALF)


def _hif4(amax: Lanes) -> tuple[Lanes, Lanes]:
    """Return the first level's up and down for blocks with this amax."""
    scale = to_bf16(amax.times(amax.constant(0x3E120000)))  # 1/7 as a bfloat16
    scale = scale.maximum(0x27800000).minimum(0x47400000)  # 2^-48, 49152
    scale = scale.round_off(((scale & EXPONENT) + 21 * UNIT) | HALF)
    up = to_bf16(scale.constant(ONE).over(scale))
    return up, amax.constant(NAN).where(amax > EXPONENT - 1, scale)


def _hif4_levels(first: tuple[Lanes, Lanes], eight: Lanes, four: Lanes) -> tuple[Lanes, Lanes]:
    """Return up and down of groups of 4 elements; `eight` and `four` are amax of their groups."""
    up, down = first
    for amax, least in ((eight, 0x40800000), (four, 0x40000000)):  # 4, 2
        larger = amax.times(up) > least - 1
        up = (up - UNIT).where(larger, up)
        down = down.times(down.constant(0x40000000)).where(larger, down)  # NaN stays NaN
    return up, down


def hif4_of_row(parts: list[list[Lanes]], amax: Lanes, bits: int) -> list[tuple[Lanes, Lanes]]:
    """Return up and down for each word of a block, given as parts."""
    up, down = (factor.like(parts[0][0]) for factor in _hif4(amax))
    factors = []
    for halves in parts:
        # A lane has one or two elements; its neighbors have the rest of a group of 4 and of 8.
        largest = functools.reduce(Lanes.maximum, halves)
        groups = []
        for distance in (1, 2, 4) if bits == 32 else (1, 2):
            largest = largest.maximum(largest.swapped(distance))
            groups.append(largest)
        factors.append(_hif4_levels((up, down), groups[-1], groups[-2]))
    return factors


def hif4_of_columns(fours: list[Lanes]) -> list[tuple[Lanes, Lanes]]:
    """Return up and down for each 4 rows of a block, from their amax."""
    first = _hif4(functools.reduce(Lanes.maximum, fours))
    pairs = zip(fours[::2], fours[1::2], strict=True)
    eights = [a.maximum(b) for a, b in pairs for _ in range(2)]
    return [_hif4_levels(first, *both) for both in zip(eights, fours, strict=True)]


# -- rounding ----------------------------------------------------------------------------------


def quantize(
    scheme: Scheme, part: Lanes, up: Lanes, down: Lanes, c: Constants, index: Lanes
) -> Lanes:
    """Return the quantized magnitudes of `part`."""
    scaled = part if scheme.scale == "none" else part.times(up)
    if scheme.scale == "hif4":
        scaled = to_bf16(scaled)
    if scheme.element == "tapered":
        return _tapered(scheme, part, scaled, down, c, index)
    scaled = scaled.minimum(c.top)
    power = (scaled & EXPONENT).maximum(c.floor)
    return _round(scheme, scaled, power, c.steps, c, index).times(down)


def _tapered(
    scheme: Scheme, part: Lanes, scaled: Lanes, down: Lanes, c: Constants, index: Lanes
) -> Lanes:
    """Round with the widths of HiFloat8; `top` is the result of overflow."""
    scaled = scaled.minimum(0x47800000)  # 2^16: all larger values overflow, too
    power = (scaled & EXPONENT).maximum(0x34800000).minimum(0x47000000)  # 2^-22, 2^15
    distance = (power - ONE).absolute()
    steps = power.constant(20 * UNIT)
    for width, exponent in ((2, 3), (1, 7), (0, 15)):
        steps = power.constant((23 - width) * UNIT).where(distance > exponent * UNIT, steps)
    rounded = _round(scheme, scaled, power, steps, c, index)
    rounded = c.top.where(rounded > 0x47000000, rounded)
    if scheme.scale == "tensor":
        rounded = rounded.times(down)
    return part.where(part > EXPONENT, rounded)


def _round(
    scheme: Scheme, scaled: Lanes, power: Lanes, steps: Lanes, c: Constants, index: Lanes
) -> Lanes:
    """Round to multiples of a quantum; `power + steps` is the pattern of 2^23 quanta."""
    if scheme.rounding == "stochastic":
        return _round_by_draw(scaled, power, steps, _draw(c.seed, index))
    if scheme.rounding == "nearest-away":
        # This rounds ties up and changes nothing else, because halves of a quantum end in zeros.
        scaled = scaled | 1
    # Add 1.5 times the power of two whose last bit is the quantum, and subtract it again.
    return scaled.round_off((power + steps) | HALF)


def _round_by_draw(scaled: Lanes, power: Lanes, steps: Lanes, draw: Lanes) -> Lanes:
    """Round up if the draw is less than the share of a quantum, in units of 2^-24."""
    quantum = power - (steps.constant(23 * UNIT) - steps)
    count = scaled.times(_inverse_power(quantum))
    lower = count.whole()
    share = count.minus(lower.float()).times(count.constant(_TWO_TO_24)).whole()
    return (lower + lower.constant(1).where(draw < share, 0)).float().times(quantum)


def _draw(seed: ir.Value, index: Lanes) -> Lanes:
    """Return the draws of stochastic.py for elements at `index`, int64, as 32-bit integers."""
    z = Lanes(index.builder, seed).like(index) + (index + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).narrowed(_WORD)


def to_bf16(pattern: Lanes) -> Lanes:
    """Round a number to the nearest bfloat16, ties to even.

    A NaN must be one that bfloat16 can represent.
    """
    return (pattern + ((pattern >> 16) & 1) + 0x7FFF) & 0xFFFF0000


# -- HiFloat8 without a scale ------------------------------------------------------------------


def hif8(word: Lanes, limit: Lanes, shift: int) -> Lanes:
    """Round float32 patterns, or, with a shift of 16, their upper halves."""
    one_pattern, unit, largest, smallest = (
        pattern >> shift for pattern in (ONE, UNIT, 0x47000000, 0x34800000)
    )
    magnitude = word & (MAGNITUDE >> shift)
    distance = ((magnitude & (EXPONENT >> shift)) - one_pattern).absolute()
    half = word.constant(unit >> 4)
    for width, exponent in ((2, 3), (1, 7), (0, 15)):
        half = word.constant(unit >> (width + 1)).where(distance > exponent * unit, half)
    rounded = (magnitude + half) & (half.constant(0) - half - half)
    rounded = rounded.maximum(smallest)
    rounded = limit.where(rounded > largest, rounded)
    rounded = magnitude.where(magnitude > (EXPONENT >> shift), rounded)
    signed = rounded | (word & ~(MAGNITUDE >> shift))
    return signed.constant(0).where(magnitude < smallest - unit, signed)
