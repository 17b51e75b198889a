"""The kernels' inner steps, as vectors: each handles one block, one row of a strip, or one run.

A 16-bit tensor is read as pairs, each a 32-bit integer, and taken apart into float32 patterns: one
half as it is, the other shifted up. That needs no packing; every result's lower half is zero.

Nothing depends on the processor's treatment of subnormals (torch.set_flush_denormal): only normal
numbers are added as floats, and only where subnormal ones would count as zero anyway.

All arguments are int64: addresses, literals (`bits`, the width of an element; `block`; `exact`) and
these, which are float32 patterns or whole numbers of 2^23, its exponents' unit:

    carry    what a scale rule adds to the pattern of amax, so that it rounds up where it should
    emax     of the element
    lowest   the smallest scale with which `exact` is not needed
    scale    the exponent of a block's scale, biased, so 0 is 2^-127
    floor    the exponent below which the block's elements are subnormal; may be negative
    limit    the pattern of the block's largest value
    steps    23 - m, for an element of m mantissa bits
"""

import functools
from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .lanes import Lanes, load

MAGNITUDE = 0x7FFFFFFF
EXPONENT = 0x7F800000  # and the pattern of Infinity
UNIT = 0x00800000  # one step of an exponent, and the bit that a normal number does not store
HALF = 0x00400000  # half of it
NAN = 0x7FC00000
HUGE = 0x73000000  # 2^103: from there on (t + C) may overflow

STRIP = 64  # columns that one `strip_*` handles
TILE = 256  # columns that are walked together, a few pages of rows at a time
RUN = 64  # elements that one `hif8_run` handles
SCRATCH = 3 * STRIP * 4  # bytes

_LITERALS = ("bits", "block", "exact")
_COUNT = 16  # lanes of one vector: 512 bits; narrower machines use several registers for it
_WORD = ir.IntType(32)
_ADDRESS = ir.IntType(64)


def _step(result: types.Type = types.void) -> Callable[[Callable], Callable]:
    """Make a function that emits code a function that numba's code can call."""

    def decorate(emit: Callable) -> Callable:
        names = emit.__code__.co_varnames[1 : emit.__code__.co_argcount]

        @functools.wraps(emit)  # numba reads its signature
        def typing(_: object, *arguments: types.Type) -> tuple[object, Callable]:
            literal = {
                name: argument.literal_value
                for name, argument in zip(names, arguments, strict=True)
                if name in _LITERALS
            }
            kinds = [
                argument if name in literal else types.int64
                for name, argument in zip(names, arguments, strict=True)
            ]

            def generate(
                target: object, builder: ir.IRBuilder, _: object, values: Sequence[ir.Value]
            ) -> ir.Value:
                given = dict(zip(names, values, strict=True)) | literal
                value = emit(builder, **given)
                return target.get_dummy_value() if value is None else value

            return result(*kinds), generate

        return intrinsic(prefer_literal=True)(typing)

    return decorate


# -- plumbing ----------------------------------------------------------------------------------


@_step(types.int64)
def field(builder, table, index) -> ir.Value:
    """Read an int64 of an array of them."""
    address = builder.add(table, builder.mul(index, ir.Constant(_ADDRESS, 8)))
    return builder.load(builder.inttoptr(address, _ADDRESS.as_pointer()))


@_step(types.int64)
def claim(builder, counter, count) -> ir.Value:
    """Add to a counter that threads share, and return what it was."""
    pointer = builder.inttoptr(counter, _ADDRESS.as_pointer())
    return builder.atomic_rmw("add", pointer, count, "monotonic")


@_step(types.int64)
def stack(builder, block) -> ir.Value:
    """Return the address of `block` bytes that last as long as the call."""
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(ir.IntType(8), block))
    return builder.ptrtoint(memory, _ADDRESS)


@_step()
def copy(builder, target, source, size) -> None:
    """Copy `size` bytes."""
    pointers = (builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in (target, source))
    cgutils.raw_memcpy(builder, *pointers, size, 1)


@_step()
def clear(builder, target, size) -> None:
    """Fill `size` bytes with zeros."""
    cgutils.memset(builder, builder.inttoptr(target, ir.IntType(8).as_pointer()), size, 0)


# -- one block in a row ------------------------------------------------------------------------


@_step(types.int64)
def block_amax(builder, source, bits, block) -> ir.Value:
    """Return the float32 pattern of the largest magnitude; above EXPONENT where there is a NaN."""
    largest = None
    for address in _addresses(builder, source, bits, block):
        for part in _split(_load(builder, address, bits, block), bits):
            largest = part if largest is None else largest.maximum(part)
    return builder.zext(largest.largest().value, _ADDRESS)


@_step(types.int64)
def scale_of(builder, amax, carry, emax) -> ir.Value:
    """Return the scale of a block."""
    amax, carry, emax = (_scalar(builder, value) for value in (amax, carry, emax))
    return builder.zext(_scale(amax, carry, emax).value, _ADDRESS)


@_step()
def block_round(builder, target, source, floor, limit, steps, bits, block, exact) -> None:
    """Round a block's elements; the target may be the source. Not for Inf and NaN."""
    words = [_load(builder, a, bits, block) for a in _addresses(builder, source, bits, block)]
    floor, limit, steps = (_scalar(builder, v).spread_like(words[0]) for v in (floor, limit, steps))
    for word, address in zip(words, _addresses(builder, target, bits, block), strict=True):
        parts = [_round(part, floor, limit, steps, exact) for part in _split(word, bits)]
        _join(parts, word, bits).store(address)


@_step()
def block_nan(builder, target, bits, block) -> None:
    """Fill a block with NaN."""
    for address in _addresses(builder, target, bits, block):
        _load(builder, address, bits, block).constant(_twice(NAN, bits)).store(address)


# -- a strip of columns, each with a block of its own ------------------------------------------
# Scratch holds three vectors of STRIP patterns: amax, which becomes floor; limit; NaN or 0.


@_step()
def strip_amax(builder, scratch, source, bits) -> None:
    """Take a row into the columns' amax."""
    for address, places in _strip(builder, source, scratch, bits):
        parts = _split(_load(builder, address, bits, STRIP), bits)
        for part, (place, _, _) in zip(parts, places, strict=True):
            load(builder, place, 32, _COUNT).maximum(part).store(place)


@_step(types.int64)
def strip_plan(builder, scratch, carry, emax, emin, top, lowest, bits) -> ir.Value:
    """Turn the columns' amax into floor, limit and NaN; return whether they need `exact`.

    emin and top are of the element: what to add to a scale to get its floor and its limit.
    """
    exact = None
    for _, places in _strip(builder, scratch, scratch, bits):
        for amax_place, limit_place, nan_place in places:
            amax = load(builder, amax_place, 32, _COUNT)
            given = (carry, emax, emin, top, lowest)
            cs, es, fs, ts, ls = (_scalar(builder, v).spread_like(amax) for v in given)
            scale = _scale(amax, cs, es)
            (scale + fs).store(amax_place)
            (scale + ts).store(limit_place)
            zero = amax.constant(0)
            amax.constant(NAN).where(amax > EXPONENT - 1, zero).store(nan_place)
            low = zero.constant(1).where(scale < ls, zero).where(amax > 0, zero)
            needs = zero.constant(1).where(amax > HUGE - 1, low)
            exact = needs if exact is None else exact | needs
    return builder.zext(exact.largest().value, _ADDRESS)


@_step()
def strip_round(builder, target, source, scratch, steps, bits, exact) -> None:
    """Round a row's elements; the target may be the source."""
    rows = zip(
        _strip(builder, source, scratch, bits), _strip(builder, target, scratch, bits), strict=True
    )
    for (address, places), (target_address, _) in rows:
        word = _load(builder, address, bits, STRIP)
        parts = []
        for part, (floor, limit, nan) in zip(_split(word, bits), places, strict=True):
            floor, limit, nan = (load(builder, place, 32, _COUNT) for place in (floor, limit, nan))
            rounded = _round(part, floor, limit, _scalar(builder, steps).spread_like(part), exact)
            parts.append(rounded | nan if exact else rounded)
        _join(parts, word, bits).store(target_address)


# -- HiFloat8 ----------------------------------------------------------------------------------


@_step()
def hif8_run(builder, target, source, limit, bits) -> None:
    """Round RUN elements, ties away from zero; the target may be the source."""
    for lane in range(0, RUN, 32):
        offset = ir.Constant(_ADDRESS, lane * bits // 8)
        word = load(builder, builder.add(source, offset), bits, 32)
        limits = Lanes(builder, builder.trunc(limit, ir.IntType(bits))).spread_like(word)
        _hif8(word, limits, 32 - bits).store(builder.add(target, offset))


def _hif8(word: Lanes, limit: Lanes, shift: int) -> Lanes:
    """Round float32 patterns, or their upper halves with a shift of 16."""
    one, unit, largest, smallest = (
        pattern >> shift for pattern in (0x3F800000, UNIT, 0x47000000, 0x34800000)
    )
    magnitude = word & (MAGNITUDE >> shift)
    distance = ((magnitude & (EXPONENT >> shift)) - one).absolute()
    half = word.constant(unit >> 4)
    for width, exponent in ((2, 3), (1, 7), (0, 15)):
        half = word.constant(unit >> (width + 1)).where(distance > exponent * unit, half)
    rounded = (magnitude + half) & (half.constant(0) - half - half)
    rounded = rounded.maximum(smallest)
    rounded = limit.where(rounded > largest, rounded)
    rounded = magnitude.where(magnitude > (EXPONENT >> shift), rounded)
    signed = rounded | (word & ~(MAGNITUDE >> shift))
    return signed.constant(0).where(magnitude < smallest - unit, signed)


# -- arithmetic on vectors ---------------------------------------------------------------------


def _scale(amax: Lanes, carry: Lanes, emax: Lanes) -> Lanes:
    return (((amax + carry) & EXPONENT) - emax).maximum(0)


def _round(part: Lanes, floor: Lanes, limit: Lanes, steps: Lanes, exact: bool) -> Lanes:
    rounded = _round_exactly(part, floor, steps) if exact else _round_fast(part, floor, steps)
    return rounded.minimum(limit)


def _round_fast(magnitude: Lanes, floor: Lanes, steps: Lanes) -> Lanes:
    """Round by adding 1.5 times a power of two whose last bit is the quantum, and taking it off."""
    addend = ((magnitude & EXPONENT).maximum(floor) + steps) | HALF
    return magnitude.round_off(addend)


def _round_exactly(magnitude: Lanes, floor: Lanes, steps: Lanes) -> Lanes:
    """Round whatever is finite, in integers: drop `shift` bits of the significand, ties to even."""
    field = (magnitude & EXPONENT).maximum(UNIT)
    below = field - UNIT
    significand = magnitude - below
    exponent = field + ((significand.constant(8) - significand.leading_zeros()) << 23)
    # A subnormal's quantum may be finer than its last bit, a small number's larger than itself.
    ahead = (exponent.maximum(floor) - field).minimum(8 * UNIT)
    shift = (ahead + steps).maximum(0) >> 23
    half = (shift.constant(1) << shift) >> 1
    odd = (significand >> shift) & 1
    rounded = ((significand + (half + odd - 1).maximum(0)) >> shift) << shift
    # A carry out of the significand goes into the exponent, where it belongs.
    return (below + rounded).where(rounded > 0, 0)


# -- memory ------------------------------------------------------------------------------------


def _split(word: Lanes, bits: int) -> list[Lanes]:
    """Return the magnitudes in a vector of 32-bit words, as float32 patterns."""
    if bits == 32:
        return [word & MAGNITUDE]
    return [word & 0x7FFF0000, (word << 16) & 0x7FFF0000]


def _join(parts: list[Lanes], word: Lanes, bits: int) -> Lanes:
    """Undo `_split`, with the signs of `word`."""
    signs = word & _twice(~MAGNITUDE, bits)
    return parts[0] | signs if bits == 32 else parts[0] | (parts[1] >> 16) | signs


def _twice(pattern: int, bits: int) -> int:
    pattern &= 0xFFFFFFFF
    return pattern if bits == 32 else pattern | pattern >> 16


def _scalar(builder: ir.IRBuilder, value: ir.Value) -> Lanes:
    return Lanes(builder, builder.trunc(value, _WORD))


def _lanes(bits: int, size: int) -> int:
    """Return how many words of `size` elements one vector takes."""
    return min(_COUNT, size * bits // 32)


def _load(builder: ir.IRBuilder, address: ir.Value, bits: int, size: int) -> Lanes:
    return load(builder, address, 32, _lanes(bits, size))


def _addresses(builder: ir.IRBuilder, start: ir.Value, bits: int, size: int) -> list[ir.Value]:
    """Return where the vectors of `size` consecutive elements lie."""
    offsets = range(0, size * bits // 8, 4 * _lanes(bits, size))
    return [builder.add(start, ir.Constant(_ADDRESS, offset)) for offset in offsets]


def _strip(
    builder: ir.IRBuilder, row: ir.Value, scratch: ir.Value, bits: int
) -> list[tuple[ir.Value, list[list[ir.Value]]]]:
    """Return where a strip's vectors lie, each with the three places in scratch of each part."""
    vectors = []
    part = 0
    for address in _addresses(builder, row, bits, STRIP):
        places = []
        for _ in range(32 // bits):
            offsets = [(array * STRIP + part * _COUNT) * 4 for array in range(3)]
            places.append([builder.add(scratch, ir.Constant(_ADDRESS, o)) for o in offsets])
            part += 1
        vectors.append((address, places))
    return vectors
