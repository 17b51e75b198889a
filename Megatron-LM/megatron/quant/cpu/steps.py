"""The inner steps of the kernels, as LLVM IR: load, amax, scale, round, store.

Each `emit_*` writes the vector code of one step; `step` makes of it a function that numba's code
can call. A vector holds the patterns of float32 as 32-bit integers, whatever dtype is in memory:
two bfloat16 in a word are two parts, the upper and the lower half.

All formats are computed alike. A magnitude is multiplied by `up`, clamped to the largest element,
rounded to an element and multiplied by `down`; both factors follow from the amax of a block, or are
the tensor's. Where an amax is no number, `down` is NaN. The kernels see to it that subnormals count
(`normal_floats`), so float32 arithmetic is the reference's, bit for bit.

Arguments are int64: addresses, float32 patterns, whole numbers of 2^23, the unit of an exponent.
`constants` is a tuple of them, one for each name in CONSTANTS:

    carry    e8m0: what a scale rule adds to the pattern of amax, so that it rounds up where due
    emax     e8m0: of the element
    top      the pattern of the largest element
    floor    the pattern of the smallest normal element
    steps    23 - m, for an element of m mantissa bits
    first    tensor: its `up`; two-level: what scales an amax to E4M3
    second   tensor: its `down`; two-level: what a block's scale is multiplied by
    seed     of stochastic rounding
"""

import functools
import inspect
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .lanes import Lanes, load

CONSTANTS = ("carry", "emax", "top", "floor", "steps", "first", "second", "seed")

MAGNITUDE = 0x7FFFFFFF
EXPONENT = 0x7F800000  # and the pattern of Infinity
UNIT = 0x00800000  # one step of an exponent, and the bit that a normal number does not store
HALF = 0x00400000  # half of it, and the pattern of 2^-127
NAN = 0x7FC00000
LARGEST = 0x7F7FFFFF  # of finite numbers
ONE = 0x3F800000

STRIP = 64  # columns that one `strip_*` handles
TILE = 256  # columns that are walked together, a few pages of rows at a time
RUN = 64  # elements that one `emit_run_round` or `emit_hif8` handles

VECTOR = 512  # bits of a vector; narrower machines use several registers for it

_COUNT = VECTOR // 32  # its lanes
_WORD = ir.IntType(32)
_ADDRESS = ir.IntType(64)
_TWO_TO_24 = 0x4B800000


class How(NamedTuple):
    """What a kernel is compiled for: the kind of scale, the rounding, and the kind of element."""

    scale: str
    rounding: str
    element: str  # "minifloat", "complement" or "tapered"

    @property
    def has_amax(self) -> bool:
        """Whether the scales follow from the amax of blocks."""
        return self.scale not in ("none", "tensor")

    @property
    def groups(self) -> int:
        """How many runs of a block have factors of their own."""
        return 16 if self.scale == "hif4" else 1

    @property
    def exact(self) -> bool:
        """Whether bfloat16 holds what becomes of a bfloat16."""
        return self.scale not in ("fp32", "tensor", "two-level")


class Constants(NamedTuple):
    """The constants as scalars."""

    carry: Lanes
    emax: Lanes
    top: Lanes
    floor: Lanes
    steps: Lanes
    first: Lanes
    second: Lanes
    seed: ir.Value

    @classmethod
    def of(cls, builder: ir.IRBuilder, values: ir.Value) -> "Constants":
        """Take a kernel's tuple apart."""
        parts = [builder.extract_value(values, i) for i in range(len(CONSTANTS))]
        words = [_scalar(builder, value) for value in parts[:-1]]
        return cls(*words, parts[-1])

    def like(self, other: Lanes) -> "Constants":
        """Return them as vectors of other's type, but for the seed."""
        return Constants(*(word.like(other) for word in self[:-1]), self.seed)


def step(emit: Callable, result: types.Type = types.void, **fixed: Any) -> Callable:
    """Make a function that emits code a function that numba's code can call.

    It has the arguments of `emit` but for the builder and what is `fixed`.
    """
    names = emit.__code__.co_varnames[1 : emit.__code__.co_argcount]
    names = [name for name in names if name not in fixed]

    def typing(_: object, *arguments: types.Type) -> tuple[object, Callable]:
        kinds = [a if isinstance(a, types.BaseTuple) else types.int64 for a in arguments]

        def generate(target: Any, builder: ir.IRBuilder, _: object, values: Any) -> ir.Value:
            value = emit(builder, **dict(zip(names, values, strict=True)), **fixed)
            return target.get_dummy_value() if value is None else value

        return result(*kinds), generate

    typing.__signature__ = inspect.Signature(  # numba reads it
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("context", *names)]
    )
    return intrinsic(typing)


# -- plumbing ----------------------------------------------------------------------------------


def emit_field(builder, table, index) -> ir.Value:
    """Read an int64 of an array of them."""
    address = builder.add(table, builder.mul(index, ir.Constant(_ADDRESS, 8)))
    return builder.load(builder.inttoptr(address, _ADDRESS.as_pointer()))


def emit_claim(builder, counter, count) -> ir.Value:
    """Add to a counter that threads share, and return what it was."""
    pointer = builder.inttoptr(counter, _ADDRESS.as_pointer())
    return builder.atomic_rmw("add", pointer, count, "monotonic")


def emit_raise(builder, counter, value) -> None:
    """Make a number that threads share as large as `value`, if it is less."""
    pointer = builder.inttoptr(counter, _ADDRESS.as_pointer())
    builder.atomic_rmw("max", pointer, value, "monotonic")


def emit_stack(builder, size) -> ir.Value:
    """Return the address of `size` bytes that last as long as the call."""
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(ir.IntType(8), size))
    return builder.ptrtoint(memory, _ADDRESS)


def emit_copy(builder, target, source, size) -> None:
    """Copy `size` bytes."""
    pointers = (builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in (target, source))
    cgutils.raw_memcpy(builder, *pointers, size, 1)


def emit_clear(builder, target, size) -> None:
    """Fill `size` bytes with zeros."""
    cgutils.memset(builder, builder.inttoptr(target, ir.IntType(8).as_pointer()), size, 0)


def emit_normal_floats(builder) -> ir.Value:
    """Have this thread compute with subnormals, and return its mode before."""
    before = _mode(builder)
    # x86: flush-to-zero and denormals-are-zero; ARM: FZ.
    flags = {"x86_64": 0x8040, "aarch64": 1 << 24}.get(platform.machine(), 0)
    _set_mode(builder, builder.and_(before, ir.Constant(before.type, ~flags)))
    return builder.zext(before, _ADDRESS) if before.type != _ADDRESS else before


def emit_restore_floats(builder, mode) -> None:
    """Set the mode that `emit_normal_floats` returned."""
    kind = _mode(builder).type
    _set_mode(builder, builder.trunc(mode, kind) if kind != _ADDRESS else mode)


def _mode(builder: ir.IRBuilder) -> ir.Value:
    if platform.machine() == "x86_64":
        place = cgutils.alloca_once(builder, _WORD)
        _call_x86(builder, "stmxcsr", place)
        return builder.load(place)
    if platform.machine() == "aarch64":
        return builder.call(_declared(builder, "llvm.aarch64.get.fpcr", _ADDRESS, []), [])
    return ir.Constant(_ADDRESS, 0)


def _set_mode(builder: ir.IRBuilder, mode: ir.Value) -> None:
    if platform.machine() == "x86_64":
        _call_x86(builder, "ldmxcsr", cgutils.alloca_once_value(builder, mode))
    elif platform.machine() == "aarch64":
        name = "llvm.aarch64.set.fpcr"
        builder.call(_declared(builder, name, ir.VoidType(), [_ADDRESS]), [mode])


def _call_x86(builder: ir.IRBuilder, name: str, place: ir.Value) -> None:
    byte = ir.IntType(8).as_pointer()
    function = _declared(builder, f"llvm.x86.sse.{name}", ir.VoidType(), [byte])
    builder.call(function, [builder.bitcast(place, byte)])


def _declared(builder: ir.IRBuilder, name: str, result: ir.Type, kinds: list) -> ir.Function:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, kinds), name)


# -- one block in a row ------------------------------------------------------------------------


def emit_block_amax(builder, source, bits, block) -> ir.Value:
    """Return the float32 pattern of the largest magnitude; above EXPONENT where there is a NaN."""
    parts = [part for word in _words(builder, source, bits, block) for part in _split(word, bits)]
    return builder.zext(functools.reduce(Lanes.maximum, parts).largest().value, _ADDRESS)


def emit_block_round(builder, target, source, amax, index, constants, bits, block, how) -> None:
    """Quantize a block's elements; the target may be the source.

    `amax` is what its scale follows from, `index` that of its first element in the draws.
    """
    words = _words(builder, source, bits, block)
    parts = [_split(word, bits) for word in words]
    c = Constants.of(builder, constants)
    if how.scale == "hif4":
        factors = _hif4_of_row(parts, _scalar(builder, amax), bits)
    else:
        up, down = _plan(how, _scalar(builder, amax), c)
        factors = [(up.like(words[0]), down.like(words[0]))] * len(words)
    _store_row(builder, target, index, words, factors, c, bits, how)


def emit_run_round(builder, target, source, index, constants, bits, block, how) -> None:
    """Quantize RUN elements, of which a vector has several blocks, and finds their scales at once.

    The target may be the source; `index` is that of the first element in the draws.
    """
    words = _words(builder, source, bits, RUN)
    c = Constants.of(builder, constants)
    factors = []
    for word in words:
        amax = functools.reduce(Lanes.maximum, _split(word, bits))
        for distance in (1, 2, 4):
            amax = amax.maximum(amax.swapped(distance)) if distance < block * bits // 32 else amax
        factors.append(_plan(how, amax, c.like(amax)))
    _store_row(builder, target, index, words, factors, c, bits, how)


def _store_row(builder, target, index, words, factors, c, bits, how) -> None:
    """Quantize words by the factors of each, and write them one behind the other."""
    every = c.like(words[0])
    size = len(words) * words[0].count * 32 // bits
    places = _places(builder, index, words, bits)
    addresses = _addresses(builder, target, bits, size)
    for word, (up, down), at, address in zip(words, factors, places, addresses, strict=True):
        rounded = [
            _quantize(how, part, up, down, every, place)
            for part, place in zip(_split(word, bits), at, strict=True)
        ]
        _join(how, rounded, word, bits).store(address)


# -- a strip of columns, each with a block of its own ------------------------------------------
# Scratch holds two vectors of STRIP patterns for each group of rows: amax, which becomes up; down.


def strip_bytes(how: How) -> int:
    """Return the size of a strip's scratch."""
    return how.groups * group_bytes()


def group_bytes() -> int:
    """Return the size of the scratch of one group of rows."""
    return 2 * STRIP * 4


def emit_strip_amax(builder, scratch, source, bits) -> None:
    """Take a row into the columns' amax."""
    for word, places in _strip(builder, source, scratch, bits):
        for part, (place, _) in zip(_split(word, bits), places, strict=True):
            load(builder, place, 32, _COUNT).maximum(part).store(place)


def emit_strip_plan(builder, scratch, constants, bits, how) -> None:
    """Turn the columns' amax into up and down."""
    c = Constants.of(builder, constants)
    for _, places in _strip(builder, scratch, scratch, bits):
        for place in places:
            groups = [_moved(builder, place, g * group_bytes()) for g in range(how.groups)]
            amax = [load(builder, up, 32, _COUNT) for up, _ in groups]
            if how.scale == "hif4":
                factors = _hif4_of_columns(amax)
            else:
                factors = [_plan(how, amax[0], c.like(amax[0]))]
            for values, targets in zip(factors, groups, strict=True):
                for value, address in zip(values, targets, strict=True):
                    value.store(address)


def emit_strip_round(builder, target, source, scratch, index, constants, bits, how) -> None:
    """Quantize a row's elements; the target may be the source."""
    strip = _strip(builder, source, scratch, bits)
    every = Constants.of(builder, constants).like(strip[0][0])
    draws = _places(builder, index, [word for word, _ in strip], bits)
    targets = _addresses(builder, target, bits, STRIP)
    for (word, places), at, address in zip(strip, draws, targets, strict=True):
        rounded = []
        for part, factors, place in zip(_split(word, bits), places, at, strict=True):
            up, down = (load(builder, factor, 32, _COUNT) for factor in factors)
            rounded.append(_quantize(how, part, up, down, every, place))
        _join(how, rounded, word, bits).store(address)


# -- HiFloat8 without a scale ------------------------------------------------------------------


def emit_hif8(builder, target, source, limit, bits) -> None:
    """Round RUN elements, ties away from zero; the target may be the source."""
    for lane in range(0, RUN, 32):
        offset = ir.Constant(_ADDRESS, lane * bits // 8)
        word = load(builder, builder.add(source, offset), bits, 32)
        limits = Lanes(builder, builder.trunc(limit, ir.IntType(bits))).like(word)
        _hif8(word, limits, 32 - bits).store(builder.add(target, offset))


def _hif8(word: Lanes, limit: Lanes, shift: int) -> Lanes:
    """Round float32 patterns, or their upper halves with a shift of 16."""
    one, unit, largest, smallest = (
        pattern >> shift for pattern in (ONE, UNIT, 0x47000000, 0x34800000)
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


# -- scales ------------------------------------------------------------------------------------


def _plan(how: How, amax: Lanes, c: Constants) -> tuple[Lanes, Lanes]:
    """Return up and down; `scales.py` defines each kind."""
    if not how.has_amax:
        return c.first, c.second
    up, down = _FACTORS[how.scale](amax, c)
    return up, amax.constant(NAN).where(amax > EXPONENT - 1, down)


def _e8m0(amax: Lanes, c: Constants) -> tuple[Lanes, Lanes]:
    # The fraction of a subnormal amax, of which only 2^-127 and more counts, begins a bit lower.
    amax = ((amax << 1) - UNIT).maximum(0).where(amax < UNIT, amax)
    scale = (((amax + c.carry) & EXPONENT) - c.emax).maximum(0).minimum(254 * UNIT)
    return _inverse_power(scale), scale.maximum(HALF)


def _fp32(amax: Lanes, c: Constants) -> tuple[Lanes, Lanes]:
    up = amax.constant(ONE).where(amax.equals(0), c.top.over(amax).minimum(LARGEST))
    return up, up.constant(ONE).over(up)


def _two_level(amax: Lanes, c: Constants) -> tuple[Lanes, Lanes]:
    scaled = amax.times(c.first).minimum(0x43E00000)  # 448
    power = (scaled & EXPONENT).maximum(0x3C800000)  # 2^-6
    down = scaled.round_off((power + 20 * UNIT) | HALF).times(c.second)
    return down.constant(ONE).over(down).minimum(LARGEST), down


_FACTORS = {
    "e8m0": _e8m0,
    "fp32": _fp32,
    "two-level": _two_level,
}


def _inverse_power(pattern: Lanes) -> Lanes:
    """Return 2^-e for the pattern of 2^e, or for 0, which stands for 2^-127."""
    return (pattern.constant(254 * UNIT) - pattern).maximum(HALF)


def _hif4(amax: Lanes) -> tuple[Lanes, Lanes]:
    """Return the first level's up and down, of blocks with that amax."""
    scale = _to_bf16(amax.times(amax.constant(0x3E120000)))  # 1/7 as a bfloat16
    scale = scale.maximum(0x27800000).minimum(0x47400000)  # 2^-48, 49152
    scale = scale.round_off(((scale & EXPONENT) + 21 * UNIT) | HALF)
    up = _to_bf16(scale.constant(ONE).over(scale))
    return up, amax.constant(NAN).where(amax > EXPONENT - 1, scale)


def _hif4_levels(first: tuple[Lanes, Lanes], eight: Lanes, four: Lanes) -> tuple[Lanes, Lanes]:
    """Return up and down of groups of 4 elements; `eight` and `four` are the amax around them."""
    up, down = first
    for amax, least in ((eight, 0x40800000), (four, 0x40000000)):  # 4, 2
        larger = amax.times(up) > least - 1
        up = (up - UNIT).where(larger, up)
        down = down.times(down.constant(0x40000000)).where(larger, down)  # NaN stays NaN
    return up, down


def _hif4_of_row(parts: list[list[Lanes]], amax: Lanes, bits: int) -> list[tuple[Lanes, Lanes]]:
    up, down = (factor.like(parts[0][0]) for factor in _hif4(amax))
    factors = []
    for halves in parts:
        # A lane has one element, or two; neighbors have the rest of a group of 4, and of 8.
        largest = functools.reduce(Lanes.maximum, halves)
        groups = []
        for distance in (1, 2, 4) if bits == 32 else (1, 2):
            largest = largest.maximum(largest.swapped(distance))
            groups.append(largest)
        factors.append(_hif4_levels((up, down), groups[-1], groups[-2]))
    return factors


def _hif4_of_columns(fours: list[Lanes]) -> list[tuple[Lanes, Lanes]]:
    first = _hif4(functools.reduce(Lanes.maximum, fours))
    pairs = zip(fours[::2], fours[1::2], strict=True)
    eights = [a.maximum(b) for a, b in pairs for _ in range(2)]
    return [_hif4_levels(first, *both) for both in zip(eights, fours, strict=True)]


# -- rounding ----------------------------------------------------------------------------------


def _quantize(how: How, part: Lanes, up: Lanes, down: Lanes, c: Constants, place: Lanes) -> Lanes:
    """Return the quantized magnitudes of `part`."""
    scaled = part if how.scale == "none" else part.times(up)
    if how.scale == "hif4":
        scaled = _to_bf16(scaled)
    if how.element == "tapered":
        return _tapered(how, part, scaled, down, c, place)
    scaled = scaled.minimum(c.top)
    power = (scaled & EXPONENT).maximum(c.floor)
    return _round(how, scaled, power, c.steps, c, place).times(down)


def _tapered(
    how: How, part: Lanes, scaled: Lanes, down: Lanes, c: Constants, place: Lanes
) -> Lanes:
    """Round with the widths of HiFloat8; `top` is what overflow makes of what is too large."""
    scaled = scaled.minimum(0x47800000)  # 2^16: all that is larger overflows, too
    power = (scaled & EXPONENT).maximum(0x34800000).minimum(0x47000000)  # 2^-22, 2^15
    distance = (power - ONE).absolute()
    steps = power.constant(20 * UNIT)
    for width, exponent in ((2, 3), (1, 7), (0, 15)):
        steps = power.constant((23 - width) * UNIT).where(distance > exponent * UNIT, steps)
    rounded = _round(how, scaled, power, steps, c, place)
    rounded = c.top.where(rounded > 0x47000000, rounded)
    if how.scale == "tensor":
        rounded = rounded.times(down)
    return part.where(part > EXPONENT, rounded)


def _round(
    how: How, scaled: Lanes, power: Lanes, steps: Lanes, c: Constants, place: Lanes
) -> Lanes:
    """Round to multiples of a quantum: `power` without its `steps` of 2^23."""
    if how.rounding == "stochastic":
        return _round_by_draw(scaled, power, steps, _draw(c.seed, place))
    if how.rounding == "nearest-away":
        # That takes a tie up and nothing else anywhere, as halves of a quantum end in zeros.
        scaled = scaled | 1
    # Adding 1.5 times a power of two whose last bit is the quantum, and taking it off.
    return scaled.round_off((power + steps) | HALF)


def _round_by_draw(scaled: Lanes, power: Lanes, steps: Lanes, draw: Lanes) -> Lanes:
    """Go up where the draw is less than the share of a quantum, in whole 2^-24."""
    quantum = power - (steps.constant(23 * UNIT) - steps)
    count = scaled.times(_inverse_power(quantum))
    lower = count.whole()
    share = count.minus(lower.float()).times(count.constant(_TWO_TO_24)).whole()
    return (lower + lower.constant(1).where(draw < share, 0)).float().times(quantum)


def _draw(seed: ir.Value, place: Lanes) -> Lanes:
    """Return what stochastic.draws has for the elements at `place`, int64, as 32-bit integers."""
    z = Lanes(place.builder, seed).like(place) + (place + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).narrowed(_WORD)


def _to_bf16(pattern: Lanes) -> Lanes:
    """Round a positive number to the nearest bfloat16, ties to even."""
    return (pattern + ((pattern >> 16) & 1) + 0x7FFF) & 0xFFFF0000


# -- memory ------------------------------------------------------------------------------------


def _split(word: Lanes, bits: int) -> list[Lanes]:
    """Return the magnitudes in a vector of 32-bit words, as float32 patterns."""
    if bits == 32:
        return [word & MAGNITUDE]
    return [word & 0x7FFF0000, (word << 16) & 0x7FFF0000]


def _join(how: How, parts: list[Lanes], word: Lanes, bits: int) -> Lanes:
    """Undo `_split`, with the signs of `word`."""
    signs = word & _twice(~MAGNITUDE, bits)
    if how.element != "minifloat":  # zero has no sign
        keep = [
            signs.constant(sign).where(p > 0, 0) for sign, p in zip(_SIGNS, parts, strict=False)
        ]
        signs = signs & functools.reduce(Lanes.__or__, keep)
    if bits == 32:
        return parts[0] | signs
    parts = parts if how.exact else [_to_bf16(part) for part in parts]
    return parts[0] | (parts[1] >> 16) | signs


_SIGNS = (0x80000000, 0x8000)  # of a word's parts


def _twice(pattern: int, bits: int) -> int:
    pattern &= 0xFFFFFFFF
    return pattern if bits == 32 else pattern | pattern >> 16


def _scalar(builder: ir.IRBuilder, value: ir.Value) -> Lanes:
    return Lanes(builder, builder.trunc(value, _WORD))


def _lanes(bits: int, size: int) -> int:
    """Return how many words of `size` elements one vector takes."""
    return min(_COUNT, size * bits // 32)


def _words(builder: ir.IRBuilder, start: ir.Value, bits: int, size: int) -> list[Lanes]:
    """Read `size` consecutive elements."""
    count = _lanes(bits, size)
    return [load(builder, a, 32, count) for a in _addresses(builder, start, bits, size)]


def _addresses(builder: ir.IRBuilder, start: ir.Value, bits: int, size: int) -> list[ir.Value]:
    """Return where the vectors of `size` consecutive elements lie."""
    offsets = range(0, size * bits // 8, 4 * _lanes(bits, size))
    return [builder.add(start, ir.Constant(_ADDRESS, offset)) for offset in offsets]


def _places(
    builder: ir.IRBuilder, index: ir.Value, words: list[Lanes], bits: int
) -> Iterator[list[Lanes]]:
    """Return the index of each element in the draws, int64, for each part of the words."""
    each = 32 // bits
    count = words[0].count
    for number, _ in enumerate(words):
        start = number * count * each
        # The upper half of a word is the second element.
        yield [
            Lanes.counting(builder, index, [start + each * lane + odd for lane in range(count)])
            for odd in reversed(range(each))
        ]


def _moved(builder: ir.IRBuilder, places: list[ir.Value], offset: int) -> list[ir.Value]:
    return [builder.add(place, ir.Constant(_ADDRESS, offset)) for place in places]


def _strip(
    builder: ir.IRBuilder, row: ir.Value, scratch: ir.Value, bits: int
) -> list[tuple[Lanes, list[list[ir.Value]]]]:
    """Return a strip's words, each with the two places in scratch of each part."""
    vectors = []
    part = 0
    for word in _words(builder, row, bits, STRIP):
        places = []
        for _ in range(32 // bits):
            offsets = [(array * STRIP + part * _COUNT) * 4 for array in range(2)]
            places.append([builder.add(scratch, ir.Constant(_ADDRESS, o)) for o in offsets])
            part += 1
        vectors.append((word, places))
    return vectors
