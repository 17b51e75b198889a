"""The loops around the inner steps, one function a kernel, and what a kernel's table holds.

A kernel takes the address of an int64 array and returns nothing. Several threads call it with the
same array: its first entry is a counter from which they take their work, `grain` units at a time.
Entries 9 to 16 are the constants of steps.py. Where a rounding draws, the memory is in the order of
the tensor's elements, so that an element's place in memory is its index.
"""

from collections.abc import Callable

from numba import njit, types

from .steps import (
    CONSTANTS,
    RUN,
    STRIP,
    TILE,
    How,
    emit_block_amax,
    emit_block_round,
    emit_claim,
    emit_clear,
    emit_copy,
    emit_field,
    emit_hif8,
    emit_normal_floats,
    emit_raise,
    emit_restore_floats,
    emit_stack,
    emit_strip_amax,
    emit_strip_plan,
    emit_strip_round,
    group_bytes,
    step,
    strip_bytes,
)

ENTRIES = 9  # of a table before the constants
_inline = njit(error_model="numpy", forceinline=True)

field = step(emit_field, types.int64)
claim = step(emit_claim, types.int64)
raise_to = step(emit_raise)
copy = step(emit_copy)
clear = step(emit_clear)
normal_floats = step(emit_normal_floats, types.int64)
restore_floats = step(emit_restore_floats)


def _stack(size: int) -> Callable[[], int]:
    return step(emit_stack, types.int64, size=size)


@_inline
def _constants(table) -> tuple[int, ...]:
    return (
        field(table, ENTRIES),
        field(table, ENTRIES + 1),
        field(table, ENTRIES + 2),
        field(table, ENTRIES + 3),
        field(table, ENTRIES + 4),
        field(table, ENTRIES + 5),
        field(table, ENTRIES + 6),
        field(table, ENTRIES + 7),
    )


def amax(bits: int) -> Callable[[int], None]:
    """The pattern of a tensor's largest magnitude, which entry 7 of the table becomes.

    table: counter, units, grain, source, 0, size, total elements, amax.
    """
    width, most = bits // 8, 4 * RUN
    largest = step(emit_block_amax, types.int64, bits=bits, block=most)
    stack = _stack(most * width)

    def run(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, size, total = field(table, 3), field(table, 5), field(table, 6)
        scratch, found = stack(), 0
        while True:
            first = claim(table, grain)
            if first >= units:
                break
            at = first * size
            end = min((first + grain) * size, total)
            while at + most <= end:
                found = max(found, largest(source + at * width))
                at += most
            if at < end:
                clear(scratch, most * width)
                copy(scratch, source + at * width, (end - at) * width)
                found = max(found, largest(scratch))
        raise_to(table + 7 * 8, found)

    return run


def rows(bits: int, block: int, how: How) -> Callable[[int], None]:
    """Blocks along the memory. Units are rows of `size` elements, the last perhaps shorter.

    table: counter, units, grain, source, target, size, total elements, 0, 0, the constants.
    """
    width, has_amax = bits // 8, how.has_amax
    largest = step(emit_block_amax, types.int64, bits=bits, block=block)
    quantize = step(emit_block_round, bits=bits, block=block, how=how)
    block_bytes = block * width
    stack = _stack(block_bytes)

    @_inline
    def row(target, source, index, size, scratch, constants) -> None:
        for at in range(0, size // block * block, block):
            place = source + at * width
            found = largest(place) if has_amax else 0
            quantize(target + at * width, place, found, index + at, constants)
        rest = size % block
        if rest:
            at = size - rest
            clear(scratch, block_bytes)
            copy(scratch, source + at * width, rest * width)
            found = largest(scratch) if has_amax else 0
            quantize(scratch, scratch, found, index + at, constants)
            copy(target + at * width, scratch, rest * width)

    def run(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, total = field(table, 5), field(table, 6)
        constants, scratch, mode = _constants(table), stack(), normal_floats()
        while True:
            first = claim(table, grain)
            if first >= units:
                break
            for unit in range(first, min(first + grain, units)):
                start = unit * size
                at = start * width
                count = min(size, total - start)
                row(target + at, source + at, start, count, scratch, constants)
        restore_floats(mode)

    return run


def squares(bits: int, block: int, how: How) -> Callable[[int], None]:
    """Squares of a matrix of `size` columns. A unit is a band of `block` rows, the last shorter.

    table: counter, units, grain, source, target, size, height, 0, 0, the constants.
    """
    width = bits // 8
    largest = step(emit_block_amax, types.int64, bits=bits, block=block)
    quantize = step(emit_block_round, bits=bits, block=block, how=how)
    block_bytes = block * width
    stack = _stack(block * block_bytes)

    @_inline
    def square(target, source, index, pitch, height, constants) -> None:
        """`pitch` is the way from a row to the next one, in elements."""
        found = 0
        for i in range(height):
            found = max(found, largest(source + i * pitch * width))
        for i in range(height):
            at = i * pitch
            quantize(target + at * width, source + at * width, found, index + at, constants)

    @_inline
    def part_of_square(target, source, index, pitch, height, count, scratch, constants) -> None:
        found = 0
        clear(scratch, block * block_bytes)
        for i in range(height):
            copy(scratch + i * block_bytes, source + i * pitch * width, count * width)
            found = max(found, largest(scratch + i * block_bytes))
        for i in range(height):
            place = scratch + i * block_bytes
            quantize(place, place, found, index + i * pitch, constants)
            copy(target + i * pitch * width, place, count * width)

    def run(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, total = field(table, 5), field(table, 6)
        constants, scratch, mode = _constants(table), stack(), normal_floats()
        while True:
            first = claim(table, grain)
            if first >= units:
                break
            for unit in range(first, min(first + grain, units)):
                height = min(block, total - unit * block)
                start = unit * block * size
                for column in range(0, size // block * block, block):
                    at = start + column
                    place = at * width
                    square(target + place, source + place, at, size, height, constants)
                rest = size % block
                if rest:
                    at = start + size - rest
                    part_of_square(
                        target + at * width,
                        source + at * width,
                        at,
                        size,
                        height,
                        rest,
                        scratch,
                        constants,
                    )
        restore_floats(mode)

    return run


def columns(bits: int, block: int, how: How) -> Callable[[int], None]:
    """Blocks across the memory, of `inner` columns side by side, read in rows.

    A unit is a tile: up to TILE columns of one row of blocks.
    table: counter, units, grain, source, target, size, inner, blocks, tiles, the constants.
    """
    width = bits // 8
    strip_width, spare_bytes = STRIP * width, block * STRIP * width
    run_rows, group, scratch_bytes = block // how.groups, group_bytes(), strip_bytes(how)
    take = step(emit_strip_amax, bits=bits)
    plan = step(emit_strip_plan, bits=bits, how=how)
    quantize = step(emit_strip_round, bits=bits, how=how)
    stack, spare_stack = _stack(TILE // STRIP * scratch_bytes), _stack(spare_bytes)

    @_inline
    def strips(target, source, index, pitch, stride, height, count, scratch, constants) -> None:
        """Quantize `height` rows of `count` strips, the next row `pitch` bytes further on.

        `stride` is the way from a row to the next one in the draws.
        """
        clear(scratch, count * scratch_bytes)
        for i in range(height):
            for s in range(count):
                place = scratch + s * scratch_bytes + i // run_rows * group
                take(place, source + i * pitch + s * strip_width)
        for s in range(count):
            plan(scratch + s * scratch_bytes, constants)
        for i in range(height):
            for s in range(count):
                at = i * pitch + s * strip_width
                place = scratch + s * scratch_bytes + i // run_rows * group
                drawn = index + i * stride + s * STRIP
                quantize(target + at, source + at, place, drawn, constants)

    @_inline
    def rest_of_row(target, source, index, inner, height, count, spare, scratch, constants) -> None:
        """Quantize less than a strip, `count` elements wide, in a copy."""
        pitch = inner * width
        for i in range(height):
            copy(spare + i * strip_width, source + i * pitch, count * width)
        strips(spare, spare, index, strip_width, inner, height, 1, scratch, constants)
        for i in range(height):
            copy(target + i * pitch, spare + i * strip_width, count * width)

    def run(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, inner = field(table, 5), field(table, 6)
        blocks, tiles = field(table, 7), field(table, 8)
        constants, mode = _constants(table), normal_floats()
        scratch, spare = stack(), spare_stack()
        while True:
            first = claim(table, grain)
            if first >= units:
                break
            for unit in range(first, min(first + grain, units)):
                column = unit % tiles * TILE
                block_row = unit // tiles
                row = block_row % blocks * block
                height = min(block, size - row)
                index = (block_row // blocks * size + row) * inner + column
                at = index * width
                used = min(TILE, inner - column)
                count = used // STRIP
                strips(
                    target + at,
                    source + at,
                    index,
                    inner * width,
                    inner,
                    height,
                    count,
                    scratch,
                    constants,
                )
                rest = used % STRIP
                if rest:
                    index += count * STRIP
                    at = index * width
                    rest_of_row(
                        target + at,
                        source + at,
                        index,
                        inner,
                        height,
                        rest,
                        spare,
                        scratch,
                        constants,
                    )
        restore_floats(mode)

    return run


def hif8(bits: int) -> Callable[[int], None]:
    """HiFloat8 to nearest, without a scale. Units are rows of `size` elements, the last shorter.

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


assert len(CONSTANTS) == 8  # as `_constants` reads
