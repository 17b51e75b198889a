"""The inner steps of the kernels, as LLVM IR: load, amax, scale, round, store.

Each `emit_*` writes the vector code of one step; `step` turns it into a function for numba code. A
vector has 32-bit lanes with the bit patterns of float32 values. A vector of words in memory has one
*part* of float32, or two of bfloat16: the upper and the lower half of each word.

For each block, `up` and `down` are the factors to the format's range and back, and the *draws* are
the random numbers for stochastic rounding, one per element of the tensor.

Arguments are int64: addresses, counts and float32 patterns. `constants` is a tuple of these, one
for each name in CONSTANTS of arithmetic.py.
"""

import functools
import inspect
import platform
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from mqo.quant.cpu.arithmetic import (
    ANCHOR,
    CONSTANTS,
    MAGNITUDE,
    Constants,
    Scheme,
    candidates,
    finite,
    hif4_of_columns,
    hif4_of_row,
    hif8,
    plan,
    quantize,
    rounded_with_error,
    scalar,
    takes_four,
    to_bf16,
)
from mqo.quant.cpu.lanes import Lanes, call, load
from mqo.quant.scales import FOUR, pattern

STRIP = 64  # columns that one `strip_*` handles
TILE = 256  # columns that are processed together, so that few memory pages are in use
RUN = 64  # elements that one `emit_run_round` or `emit_hif8` handles
ENTRIES = 9  # number of entries of a table before the constants
VECTOR = 512  # bits of a vector; narrower machines use several registers for it

_COUNT = VECTOR // 32  # its lanes
_WORD = ir.IntType(32)
_ADDRESS = ir.IntType(64)


def step(emit: Callable, result: types.Type = types.void, **fixed: Any) -> Callable:
    """Turn a function that emits code into a function that numba code can call.

    It has the arguments of `emit` except the builder and those in `fixed`.
    """
    code = emit.__code__
    names = [name for name in code.co_varnames[1 : code.co_argcount] if name not in fixed]

    def typing(_: object, *arguments: types.Type) -> tuple[object, Callable]:
        kinds = [a if isinstance(a, types.BaseTuple) else types.int64 for a in arguments]

        def generate(target: Any, builder: ir.IRBuilder, _: object, values: Any) -> ir.Value:
            value = emit(builder, **dict(zip(names, values, strict=True)), **fixed)
            return target.get_dummy_value() if value is None else value

        return result(*kinds), generate

    # numba reads it
    typing.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("context", *names)]
    )
    return intrinsic(typing)


# -- plumbing ----------------------------------------------------------------------------------


def emit_field(builder, table, index) -> ir.Value:
    """Read an entry of an int64 array."""
    address = builder.add(table, builder.mul(index, ir.Constant(_ADDRESS, 8)))
    return builder.load(builder.inttoptr(address, _ADDRESS.as_pointer()))


def emit_constants(builder, table) -> ir.Value:
    """Read the constants, which follow the ENTRIES of a table."""
    entries = (ir.Constant(_ADDRESS, ENTRIES + i) for i in range(len(CONSTANTS)))
    return cgutils.pack_array(builder, [emit_field(builder, table, entry) for entry in entries])


def emit_fetch_add(builder, counter, count) -> ir.Value:
    """Add to a counter that threads share, and return its old value."""
    pointer = builder.inttoptr(counter, _ADDRESS.as_pointer())
    return builder.atomic_rmw("add", pointer, count, "monotonic")


def emit_atomic_max(builder, counter, value) -> None:
    """Raise a number that threads share to `value`, if it is smaller."""
    pointer = builder.inttoptr(counter, _ADDRESS.as_pointer())
    builder.atomic_rmw("max", pointer, value, "monotonic")


def emit_stack(builder, size) -> ir.Value:
    """Return the address of `size` bytes on the stack."""
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(ir.IntType(8), size))
        memory.align = VECTOR // 8
    return builder.ptrtoint(memory, _ADDRESS)


def emit_copy(builder, target, source, size) -> None:
    """Copy `size` bytes."""
    pointers = (builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in (target, source))
    cgutils.raw_memcpy(builder, *pointers, size, 1)


def emit_clear(builder, target, size) -> None:
    """Fill `size` bytes with zeros."""
    cgutils.memset(builder, builder.inttoptr(target, ir.IntType(8).as_pointer()), size, 0)


def emit_normal_floats(builder) -> ir.Value:
    """Stop this thread from flushing subnormals, and return its previous mode."""
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
        pointer = cgutils.alloca_once(builder, _WORD)
        _call_x86(builder, "stmxcsr", pointer)
        return builder.load(pointer)
    if platform.machine() == "aarch64":
        return call(builder, "llvm.aarch64.get.fpcr", _ADDRESS)
    return ir.Constant(_ADDRESS, 0)


def _set_mode(builder: ir.IRBuilder, mode: ir.Value) -> None:
    if platform.machine() == "x86_64":
        _call_x86(builder, "ldmxcsr", cgutils.alloca_once_value(builder, mode))
    elif platform.machine() == "aarch64":
        call(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), mode)


def _call_x86(builder: ir.IRBuilder, name: str, pointer: ir.Value) -> None:
    byte = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    call(builder, f"llvm.x86.sse.{name}", ir.VoidType(), byte)


# -- one block in a row ------------------------------------------------------------------------


def emit_block_amax(builder, source, bits, block) -> ir.Value:
    """Return the float32 pattern of the amax; it is above EXPONENT, that of inf, for a NaN."""
    parts = [part for word in _words(builder, source, bits, block) for part in _split(word, bits)]
    return builder.zext(functools.reduce(Lanes.maximum, parts).largest().value, _ADDRESS)


def emit_block_round(builder, target, source, amax, index, constants, bits, block, scheme) -> None:
    """Quantize a block's elements; the target may be the source.

    `amax` determines its scale; `index` is the position of its first element among the draws.
    """
    words = _words(builder, source, bits, block)
    parts = [_split(word, bits) for word in words]
    c = Constants.from_tuple(builder, constants)
    if scheme.scale == "hif4":
        factors = hif4_of_row(parts, scalar(builder, amax), bits)
    else:
        up, down = plan(scheme, scalar(builder, amax), c)
        factors = [(up.like(words[0]), down.like(words[0]))] * len(words)
    _store_row(builder, target, index, words, factors, c, bits, scheme)


def emit_run_round(builder, target, source, index, constants, bits, block, scheme) -> None:
    """Quantize RUN elements with several blocks per vector, whose scales are computed together.

    The target may be the source; `index` is the position of the first element among the draws.
    """
    words = _words(builder, source, bits, RUN)
    c = Constants.from_tuple(builder, constants)
    factors = []
    for word in words:
        amax = functools.reduce(Lanes.maximum, _split(word, bits))
        for distance in (1, 2, 4):
            amax = amax.maximum(amax.swapped(distance)) if distance < block * bits // 32 else amax
        factors.append(plan(scheme, amax, c.like(amax)))
    _store_row(builder, target, index, words, factors, c, bits, scheme)


# Where errors choose the scale, a single vector has the numbers of all blocks of a run: those for
# the scales that map to 6, and then those for 4. The number of a word is in a lane's lowest bits.


def emit_run_by_error(builder, target, source, index, constants, bits, block, scheme) -> None:
    """Quantize RUN elements as `emit_run_round`, by the scales with the smaller error."""
    words = _words(builder, source, bits, RUN)
    parts = [_split(word, bits) for word in words]
    c = Constants.from_tuple(builder, constants)
    every, lanes, count = c.like(words[0]), block * bits // 32, len(words)
    amax = _gathered([functools.reduce(Lanes.maximum, p) for p in parts], lanes, Lanes.maximum)
    amax = _shortened(amax, lanes, count)
    few = c.like(amax)
    factors = amax.listed([pattern(FOUR if i & count else 1.0) for i in range(amax.count)])
    scale, up = candidates(scheme, amax, factors, few)
    rounded, sums = _both_rounded(scheme, parts, up, lanes, every)
    error = _shortened(_gathered(sums, lanes, Lanes.__add__), lanes, count)
    error = error - (block * ANCHOR & 0xFFFFFFFF)
    # In the lanes for 4; `count` lanes away are those for 6.
    six = scale.swapped(count)
    mask = takes_four(scheme, (six, scale), (error.swapped(count), error))
    down = finite(amax, scale.where(mask, six).times(few.third))
    up = up.where(mask, up.swapped(count))
    if scheme.rounding != "nearest-even":
        pairs = [[_of_word(f, count + i, lanes, count) for f in (up, down)] for i in range(count)]
        _store_row(builder, target, index, words, pairs, c, bits, scheme)
        return
    chosen = amax.constant(-1).where(mask, 0)
    for i, address in enumerate(_addresses(builder, target, bits, RUN)):
        is_four, factor = (_of_word(x, count + i, lanes, count) for x in (chosen, down))
        both = zip(rounded[i], rounded[count + i], strict=True)
        values = [of_four.where(is_four < 0, of_six).times(factor) for of_six, of_four in both]
        _join(scheme, values, words[i], bits).store(address)


def _both_rounded(
    scheme: Scheme, parts: list[list[Lanes]], up: Lanes, lanes: int, c: Constants
) -> tuple[list[list[Lanes]], list[Lanes]]:
    """Return the rounded parts of each word, and their errors, for 6 and then for 4."""
    rounded, sums, count = [], [], len(parts)
    for i in range(2 * count):
        factor = _of_word(up, i, lanes, count)
        both = [rounded_with_error(scheme, p, factor, c, i >= count) for p in parts[i % count]]
        rounded.append([value for value, _ in both])
        sums.append(functools.reduce(Lanes.__add__, [error for _, error in both]))
    return rounded, sums


def _shortened(numbers: Lanes, lanes: int, count: int) -> Lanes:
    """Keep the first 2 * count of each group of `lanes`; the others repeat them."""
    return numbers.ordered([i for i in range(numbers.count) if i % lanes < 2 * count])


def _of_word(numbers: Lanes, i: int, lanes: int, count: int) -> Lanes:
    """Return number i of each group of a shortened vector, for all its lanes; below 2 * count.

    Those of `count` words have one number for 6 and one for 4 each; a choice is in that for 4.
    """
    return numbers.ordered([lane // lanes * 2 * count + i for lane in range(_COUNT)])


def _gathered(vectors: list[Lanes], lanes: int, combine: Callable) -> Lanes:
    """Combine each group of `lanes` in vectors, whose numbers become the low bits of lanes.

    Other bits within a group do not matter.
    """
    distance = 1
    while distance < lanes:
        if len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [_paired(first, second, distance, combine) for first, second in pairs]
        else:
            vectors = [combine(vectors[0], vectors[0].swapped(distance))]
        distance *= 2
    return vectors[0]


def _paired(first: Lanes, second: Lanes, distance: int, combine: Callable) -> Lanes:
    """Combine lanes `distance` apart, of the second vector where the lane's bit is set."""
    sources = [first.count if lane & distance else 0 for lane in range(first.count)]
    own = [source + lane for lane, source in enumerate(sources)]
    others = [source + (lane ^ distance) for lane, source in enumerate(sources)]
    return combine(first.ordered(own, second), first.ordered(others, second))


def _store_row(builder, target, index, words, factors, c, bits, scheme) -> None:
    """Quantize words by their factors, and write them one after another."""
    every = c.like(words[0])
    size = len(words) * words[0].count * 32 // bits
    places = _indices(builder, index, words, bits)
    addresses = _addresses(builder, target, bits, size)
    for word, (up, down), at, address in zip(words, factors, places, addresses, strict=True):
        rounded = [
            quantize(scheme, part, up, down, every, element)
            for part, element in zip(_split(word, bits), at, strict=True)
        ]
        _join(scheme, rounded, word, bits).store(address)


# -- a strip of columns, each with its own block -----------------------------------------------
# Scratch has ARRAYS of STRIP patterns for each group of rows: the amax, later `up`; and `down`.
# Where errors choose the scale, four more: `up` of both, and the sums of their errors.

_ARRAYS, _BY_ERROR = 2, 6


def strip_bytes(scheme: Scheme) -> int:
    """Return the size of a strip's scratch."""
    return (_BY_ERROR if scheme.error else scheme.groups * _ARRAYS) * STRIP * 4


def group_bytes() -> int:
    """Return the size of the scratch of one group of rows."""
    return _ARRAYS * STRIP * 4


def emit_strip_amax(builder, scratch, source, bits) -> None:
    """Update the amax of columns with a row."""
    for word, places in _strip(builder, source, scratch, bits):
        for part, (up, _) in zip(_split(word, bits), places, strict=True):
            load(builder, up, 32, _COUNT).maximum(part).store(up)


def emit_strip_pair(builder, scratch, height, constants, bits, scheme, side=1) -> None:
    """Write both `up` of columns, shared by `side` neighbors in a vector, and begin the sums."""
    c = Constants.from_tuple(builder, constants)
    anchors = scalar(builder, height) * ANCHOR
    for _, places in _strip(builder, scratch, scratch, bits, _BY_ERROR):
        if side > 1:
            _share(builder, [arrays[0] for arrays in places], side * bits // 32, Lanes.maximum)
        for arrays in places:
            amax = load(builder, arrays[0], 32, _COUNT)
            begin = amax.constant(0) - anchors.like(amax)
            for factor, up, total in zip((1.0, FOUR), arrays[2:4], arrays[4:], strict=True):
                factors = amax.constant(pattern(factor))
                candidates(scheme, amax, factors, c.like(amax))[1].store(up)
                begin.store(total)


def emit_strip_errors(builder, scratch, source, constants, bits, scheme) -> None:
    """Add the errors of a row to the sums of columns."""
    strip = _strip(builder, source, scratch, bits, _BY_ERROR)
    every = Constants.from_tuple(builder, constants).like(strip[0][0])
    for word, places in strip:
        for part, arrays in zip(_split(word, bits), places, strict=True):
            for is_four, up, total in zip((False, True), arrays[2:4], arrays[4:], strict=True):
                factor = load(builder, up, 32, _COUNT)
                _, error = rounded_with_error(scheme, part, factor, every, is_four)
                (load(builder, total, 32, _COUNT) + error).store(total)


def emit_strip_choose(builder, scratch, constants, bits, scheme, side=1) -> None:
    """Replace the amax of columns by `up` and `down` of the scale with the smaller error."""
    c = Constants.from_tuple(builder, constants)
    for _, places in _strip(builder, scratch, scratch, bits, _BY_ERROR):
        for array in (4, 5) if side > 1 else ():
            _share(builder, [arrays[array] for arrays in places], side * bits // 32, Lanes.__add__)
        for arrays in places:
            amax, _, up_six, up_four, *errors = (load(builder, at, 32, _COUNT) for at in arrays)
            every = c.like(amax)
            six, four = (
                candidates(scheme, amax, amax.constant(pattern(factor)), every)[0]
                for factor in (1.0, FOUR)
            )
            mask = takes_four(scheme, (six, four), (errors[0], errors[1]))
            up_four.where(mask, up_six).store(arrays[0])
            finite(amax, four.where(mask, six).times(every.third)).store(arrays[1])


def emit_strip_plan(builder, scratch, constants, bits, scheme, side=1) -> None:
    """Replace the amax of columns by `up` and `down`, shared by `side` neighbors in a vector."""
    c = Constants.from_tuple(builder, constants)
    for _, places in _strip(builder, scratch, scratch, bits):
        if side > 1:
            _share(builder, [up for up, _ in places], side * bits // 32, Lanes.maximum)
        for pair in places:
            groups = [_moved(builder, pair, g * group_bytes()) for g in range(scheme.groups)]
            amax = [load(builder, up, 32, _COUNT) for up, _ in groups]
            if scheme.scale == "hif4":
                factors = hif4_of_columns(amax)
            else:
                factors = [plan(scheme, amax[0], c.like(amax[0]))]
            for values, targets in zip(factors, groups, strict=True):
                for value, address in zip(values, targets, strict=True):
                    value.store(address)


def _share(builder, places, lanes, combine) -> None:
    """Combine each column's number with those of its group of `lanes` words, over all `places`."""
    number = functools.reduce(combine, [load(builder, at, 32, _COUNT) for at in places])
    for distance in (1, 2, 4, 8):
        number = combine(number, number.swapped(distance)) if distance < lanes else number
    for at in places:
        number.store(at)


def emit_strip_round(builder, target, source, scratch, index, constants, bits, scheme) -> None:
    """Quantize the elements of a row; the target may be the source."""
    strip = _strip(builder, source, scratch, bits)
    every = Constants.from_tuple(builder, constants).like(strip[0][0])
    draws = _indices(builder, index, [word for word, _ in strip], bits)
    targets = _addresses(builder, target, bits, STRIP)
    for (word, places), at, address in zip(strip, draws, targets, strict=True):
        rounded = []
        for part, factors, element in zip(_split(word, bits), places, at, strict=True):
            up, down = (load(builder, factor, 32, _COUNT) for factor in factors)
            rounded.append(quantize(scheme, part, up, down, every, element))
        _join(scheme, rounded, word, bits).store(address)


# -- HiFloat8 without a scale ------------------------------------------------------------------


def emit_hif8(builder, target, source, limit, bits) -> None:
    """Round RUN elements, ties away from zero; the target may be the source."""
    for lane in range(0, RUN, 32):
        offset = ir.Constant(_ADDRESS, lane * bits // 8)
        word = load(builder, builder.add(source, offset), bits, 32)
        limits = Lanes(builder, builder.trunc(limit, ir.IntType(bits))).like(word)
        hif8(word, limits, 32 - bits).store(builder.add(target, offset))


# -- memory ------------------------------------------------------------------------------------


def _split(word: Lanes, bits: int) -> list[Lanes]:
    """Return the magnitudes in a vector of 32-bit words, as float32 patterns."""
    if bits == 32:
        return [word & MAGNITUDE]
    return [word & 0x7FFF0000, (word << 16) & 0x7FFF0000]


def _join(scheme: Scheme, parts: list[Lanes], word: Lanes, bits: int) -> Lanes:
    """Undo `_split`, with the signs of `word`."""
    signs = word & _twice(~MAGNITUDE, bits)
    if scheme.element != "minifloat":  # zero has no sign
        keep = [
            signs.constant(sign).where(p > 0, 0) for sign, p in zip(_SIGNS, parts, strict=False)
        ]
        signs = signs & functools.reduce(Lanes.__or__, keep)
    if bits == 32:
        return parts[0] | signs
    parts = parts if scheme.exact else [to_bf16(part) for part in parts]
    return parts[0] | (parts[1] >> 16) | signs


_SIGNS = (0x80000000, 0x8000)  # of a word's parts


def _twice(pattern: int, bits: int) -> int:
    pattern &= 0xFFFFFFFF
    return pattern if bits == 32 else pattern | pattern >> 16


def _lanes(bits: int, size: int) -> int:
    """Return the number of words of `size` elements that fit in a vector."""
    return min(_COUNT, size * bits // 32)


def _words(builder: ir.IRBuilder, start: ir.Value, bits: int, size: int) -> list[Lanes]:
    """Read `size` consecutive elements."""
    count = _lanes(bits, size)
    return [load(builder, a, 32, count) for a in _addresses(builder, start, bits, size)]


def _addresses(builder: ir.IRBuilder, start: ir.Value, bits: int, size: int) -> list[ir.Value]:
    """Return the addresses of the vectors of `size` consecutive elements."""
    offsets = range(0, size * bits // 8, 4 * _lanes(bits, size))
    return [builder.add(start, ir.Constant(_ADDRESS, offset)) for offset in offsets]


def _indices(
    builder: ir.IRBuilder, index: ir.Value, words: list[Lanes], bits: int
) -> Iterator[list[Lanes]]:
    """Yield the indices of elements in the draws, int64, for each part of the words."""
    each = 32 // bits
    count = words[0].count
    for number, _ in enumerate(words):
        start = number * count * each
        # The upper half of a word is the second element.
        yield [
            Lanes.counting(builder, index, [start + each * lane + odd for lane in range(count)])
            for odd in reversed(range(each))
        ]


def _moved(builder: ir.IRBuilder, addresses: list[ir.Value], offset: int) -> list[ir.Value]:
    return [builder.add(address, ir.Constant(_ADDRESS, offset)) for address in addresses]


def _strip(
    builder: ir.IRBuilder, row: ir.Value, scratch: ir.Value, bits: int, arrays: int = _ARRAYS
) -> list[tuple[Lanes, list[list[ir.Value]]]]:
    """Return a strip's words, each with the addresses in the arrays of scratch for each part."""
    vectors = []
    part = 0
    for word in _words(builder, row, bits, STRIP):
        places = []
        for _ in range(32 // bits):
            offsets = [(array * STRIP + part * _COUNT) * 4 for array in range(arrays)]
            places.append([builder.add(scratch, ir.Constant(_ADDRESS, o)) for o in offsets])
            part += 1
        vectors.append((word, places))
    return vectors
