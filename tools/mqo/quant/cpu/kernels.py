"""The loops around the inner steps: one function per kernel, and the entries of its table.

A kernel takes the address of an int64 array and returns nothing. Several threads call it with the
same array: its first entry is a counter from which they take their work, `grain` units at a time.
Entries 9 to 16 are the constants of arithmetic.py. For stochastic rounding, the memory is in the
order of the tensor's elements, so an element's position in memory is its index.
"""

from collections.abc import Callable

from numba import njit, types

from mqo.quant.cpu.arithmetic import CONSTANTS, Scheme
from mqo.quant.cpu.steps import (
    RUN,
    STRIP,
    TILE,
    VECTOR,
    emit_atomic_max,
    emit_block_amax,
    emit_block_round,
    emit_clear,
    emit_constants,
    emit_copy,
    emit_fetch_add,
    emit_field,
    emit_hif8,
    emit_normal_floats,
    emit_restore_floats,
    emit_run_by_error,
    emit_run_round,
    emit_stack,
    emit_strip_amax,
    emit_strip_choose,
    emit_strip_errors,
    emit_strip_pair,
    emit_strip_plan,
    emit_strip_round,
    group_bytes,
    step,
    strip_bytes,
)

inline = njit(error_model="numpy", forceinline=True)

field = step(emit_field, types.int64)
constants_of = step(emit_constants, types.UniTuple(types.int64, len(CONSTANTS)))
claim = step(emit_fetch_add, types.int64)
atomic_max = step(emit_atomic_max)
copy = step(emit_copy)
clear = step(emit_clear)
normal_floats = step(emit_normal_floats, types.int64)
restore_floats = step(emit_restore_floats)


def _stack(size: int) -> Callable[[], int]:
    return step(emit_stack, types.int64, size=size)


def over_units(work: Callable, scratch_bytes: int) -> Callable[[int], None]:
    """Return a kernel that calls `work(table, unit, scratch)` for each unit of its thread."""
    stack = _stack(scratch_bytes)

    def run(table) -> None:
        units, grain, scratch, mode = field(table, 1), field(table, 2), stack(), normal_floats()
        while True:
            first = claim(table, grain)
            if first >= units:
                break
            for unit in range(first, min(first + grain, units)):
                work(table, unit, scratch)
        restore_floats(mode)

    return run


def amax(bits: int) -> Callable[[int], None]:
    """Write the pattern of a tensor's amax to entry 7 of the table.

    table: counter, units, grain, source, 0, size, total elements, amax.
    """
    width, most = bits // 8, 4 * RUN
    largest = step(emit_block_amax, types.int64, bits=bits, block=most)
    stack = _stack(most * width)

    def run(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, size, total = field(table, 3), field(table, 5), field(table, 6)
        scratch, peak = stack(), 0
        while True:
            first = claim(table, grain)
            if first >= units:
                break
            at = first * size
            end = min((first + grain) * size, total)
            while at + most <= end:
                peak = max(peak, largest(source + at * width))
                at += most
            if at < end:
                clear(scratch, most * width)
                copy(scratch, source + at * width, (end - at) * width)
                peak = max(peak, largest(scratch))
        atomic_max(table + 7 * 8, peak)

    return run


def rows(bits: int, block: int, scheme: Scheme) -> Callable[[int], None]:
    """Quantize blocks along the memory. Units are rows of `size` elements; the last may be shorter.

    table: counter, units, grain, source, target, size, total elements, 0, 0, the constants.
    """
    width = bits // 8
    largest = step(emit_block_amax, types.int64, bits=bits, block=block)
    single = step(emit_block_round, bits=bits, block=block, scheme=scheme)
    emit_run = emit_run_by_error if scheme.error else emit_run_round
    several = step(emit_run, bits=bits, block=block, scheme=scheme)
    has_amax = scheme.has_amax
    side_by_side = has_amax and (block * bits < VECTOR or scheme.error is not None)
    span = RUN if side_by_side else block

    @inline
    def quantize(target, source, index, constants) -> None:
        if side_by_side:
            several(target, source, index, constants)
        else:
            single(target, source, largest(source) if has_amax else 0, index, constants)

    @inline
    def row(table, unit, scratch) -> None:
        size, constants = field(table, 5), constants_of(table)
        start = unit * size
        source, target = field(table, 3) + start * width, field(table, 4) + start * width
        count = min(size, field(table, 6) - start)
        for at in range(0, count // span * span, span):
            quantize(target + at * width, source + at * width, start + at, constants)
        rest = count % span
        if rest:
            at = count - rest
            clear(scratch, span * width)
            copy(scratch, source + at * width, rest * width)
            quantize(scratch, scratch, start + at, constants)
            copy(target + at * width, scratch, rest * width)

    return over_units(row, span * width)


def squares(bits: int, block: int, scheme: Scheme) -> Callable[[int], None]:
    """Quantize squares of a matrix of `size` columns. A unit is a band of up to `block` rows.

    table: counter, units, grain, source, target, size, height, 0, 0, the constants.
    """
    width = bits // 8
    largest = step(emit_block_amax, types.int64, bits=bits, block=block)
    quantize = step(emit_block_round, bits=bits, block=block, scheme=scheme)
    pitch = block * width  # of a copy

    @inline
    def square(target, source, index, size, height, constants) -> None:
        """Quantize a square in rows of `size` elements."""
        peak = 0
        for i in range(height):
            peak = max(peak, largest(source + i * size * width))
        for i in range(height):
            at = i * size
            quantize(target + at * width, source + at * width, peak, index + at, constants)

    @inline
    def part_of_square(target, source, index, size, height, count, scratch, constants) -> None:
        """Quantize `count` columns, fewer than in a square, in a copy."""
        peak = 0
        clear(scratch, block * pitch)
        for i in range(height):
            copy(scratch + i * pitch, source + i * size * width, count * width)
            peak = max(peak, largest(scratch + i * pitch))
        for i in range(height):
            line = scratch + i * pitch
            quantize(line, line, peak, index + i * size, constants)
            copy(target + i * size * width, line, count * width)

    @inline
    def band(table, unit, scratch) -> None:
        size, constants = field(table, 5), constants_of(table)
        height = min(block, field(table, 6) - unit * block)
        start = unit * block * size
        source, target = field(table, 3) + start * width, field(table, 4) + start * width
        for at in range(0, size // block * block, block):
            offset = at * width
            square(target + offset, source + offset, start + at, size, height, constants)
        rest = size % block
        if rest:
            at = size - rest
            source, target, index = source + at * width, target + at * width, start + at
            part_of_square(target, source, index, size, height, rest, scratch, constants)

    return over_units(band, block * pitch)


def columns(bits: int, block: int, scheme: Scheme, side: int = 1) -> Callable[[int], None]:
    """Quantize blocks across the memory, in `inner` adjacent columns, read in rows.

    A block is `side` columns wide, at most a vector. A unit is a tile: up to TILE columns of one
    row of blocks.
    table: counter, units, grain, source, target, size, inner, blocks, tiles, the constants.
    """
    width = bits // 8
    strip_width, plans = STRIP * width, TILE // STRIP * strip_bytes(scheme)
    strips = _strips(bits, block, scheme, side)

    @inline
    def rest_of_row(target, source, index, inner, height, count, scratch, constants) -> None:
        """Quantize a part of a strip, `count` elements wide, in a copy."""
        spare, pitch = scratch + plans, inner * width
        if side > 1:  # the elements next to them in the copy belong to their blocks
            clear(spare, block * strip_width)
        for i in range(height):
            copy(spare + i * strip_width, source + i * pitch, count * width)
        strips(spare, spare, index, strip_width, inner, height, 1, scratch, constants)
        for i in range(height):
            copy(target + i * pitch, spare + i * strip_width, count * width)

    @inline
    def tile(table, unit, scratch) -> None:
        size, inner = field(table, 5), field(table, 6)
        blocks, tiles, constants = field(table, 7), field(table, 8), constants_of(table)
        column, block_row = unit % tiles * TILE, unit // tiles
        row = block_row % blocks * block
        height, used = min(block, size - row), min(TILE, inner - column)
        index = (block_row // blocks * size + row) * inner + column
        source, target = field(table, 3) + index * width, field(table, 4) + index * width
        count, pitch = used // STRIP, inner * width
        strips(target, source, index, pitch, inner, height, count, scratch, constants)
        rest = used % STRIP
        if rest:
            done = count * STRIP
            source, target, index = source + done * width, target + done * width, index + done
            rest_of_row(target, source, index, inner, height, rest, scratch, constants)

    return over_units(tile, plans + block * strip_width)


def _strips(bits: int, block: int, scheme: Scheme, side: int) -> Callable:
    """Return a function that quantizes adjacent strips of columns, `side` columns per block."""
    strip_width = STRIP * bits // 8
    run_rows, group, plan_bytes = block // scheme.groups, group_bytes(), strip_bytes(scheme)
    take = step(emit_strip_amax, bits=bits)
    by_error = scheme.error is not None
    pair = step(emit_strip_pair, bits=bits, scheme=scheme, side=side)
    add_errors = step(emit_strip_errors, bits=bits, scheme=scheme)
    emit_plan = emit_strip_choose if by_error else emit_strip_plan
    plan = step(emit_plan, bits=bits, scheme=scheme, side=side)
    quantize = step(emit_strip_round, bits=bits, scheme=scheme)

    @inline
    def strips(target, source, index, pitch, stride, height, count, scratch, constants) -> None:
        """Quantize `height` rows of `count` strips; rows are `pitch` bytes apart.

        `stride` is the distance between rows in the draws.
        """
        clear(scratch, count * plan_bytes)
        for i in range(height):
            for s in range(count):
                address = scratch + s * plan_bytes + i // run_rows * group
                take(address, source + i * pitch + s * strip_width)
        if by_error:
            for s in range(count):
                address = scratch + s * plan_bytes
                pair(address, height, constants)
                for i in range(height):
                    add_errors(address, source + i * pitch + s * strip_width, constants)
        for s in range(count):
            plan(scratch + s * plan_bytes, constants)
        for i in range(height):
            for s in range(count):
                at = i * pitch + s * strip_width
                address = scratch + s * plan_bytes + i // run_rows * group
                drawn = index + i * stride + s * STRIP
                quantize(target + at, source + at, address, drawn, constants)

    return strips


def hif8(bits: int) -> Callable[[int], None]:
    """Round to the nearest HiFloat8, without a scale. Units are rows of up to `size` elements.

    table: counter, units, grain, source, target, size, total elements, limit.
    """
    width = bits // 8
    run_bytes = RUN * width
    quantize = step(emit_hif8, bits=bits)
    stack = _stack(run_bytes)

    def run(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, total, limit = field(table, 5), field(table, 6), field(table, 7)
        scratch = stack()
        while True:
            first = claim(table, grain)
            if first >= units:
                return
            at = first * size * width
            end = min((first + grain) * size, total) * width
            while at + run_bytes <= end:
                quantize(target + at, source + at, limit)
                at += run_bytes
            if at < end:
                clear(scratch, run_bytes)
                copy(scratch, source + at, end - at)
                quantize(scratch, scratch, limit)
                copy(target + at, scratch, end - at)

    return run
