"""The loops around the inner steps, one function a kernel, and what a kernel's table holds.

A kernel takes the address of an int64 array and returns nothing. Several threads call it with the
same array: its first entry is a counter from which they take their work, `grain` units at a time.
The MX constants, entries 9 to 14, are carry, emax, emin, top, lowest and steps (see steps.py).
"""

from collections.abc import Callable

from numba import njit

from .steps import (
    EXPONENT,
    HUGE,
    RUN,
    SCRATCH,
    STRIP,
    TILE,
    block_amax,
    block_nan,
    block_round,
    claim,
    clear,
    copy,
    field,
    hif8_run,
    scale_of,
    stack,
    strip_amax,
    strip_plan,
    strip_round,
)

_inline = njit(error_model="numpy", forceinline=True)


@_inline
def _constants(table) -> tuple[int, ...]:
    return (
        field(table, 9),
        field(table, 10),
        field(table, 11),
        field(table, 12),
        field(table, 13),
        field(table, 14),
    )


def mx_rows(bits: int, block: int) -> Callable[[int], None]:
    """Blocks along the memory. Units are rows of `size` elements, the last perhaps shorter.

    table: counter, units, grain, source, target, size, total elements, 0, 0, the MX constants.
    """
    width = bits // 8
    block_bytes = block * width

    @_inline
    def whole_block(target, source, constants) -> None:
        carry, emax, emin, top, lowest, steps = constants
        amax = block_amax(source, bits, block)
        scale = scale_of(amax, carry, emax)
        if amax < HUGE and (scale >= lowest or amax == 0):
            block_round(target, source, scale + emin, scale + top, steps, bits, block, 0)
        elif amax < EXPONENT:
            block_round(target, source, scale + emin, scale + top, steps, bits, block, 1)
        else:
            block_nan(target, bits, block)

    @_inline
    def row(target, source, size, scratch, constants) -> None:
        whole = size // block * block_bytes
        for at in range(0, whole, block_bytes):
            whole_block(target + at, source + at, constants)
        rest = size * width - whole
        if rest:
            clear(scratch, block_bytes)
            copy(scratch, source + whole, rest)
            whole_block(scratch, scratch, constants)
            copy(target + whole, scratch, rest)

    def rows(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, total = field(table, 5), field(table, 6)
        constants, scratch = _constants(table), stack(block_bytes)
        while True:
            first = claim(table, grain)
            if first >= units:
                return
            for unit in range(first, min(first + grain, units)):
                start = unit * size
                at = start * width
                row(target + at, source + at, min(size, total - start), scratch, constants)

    return rows


def mx_columns(bits: int, block: int) -> Callable[[int], None]:
    """Blocks across the memory, of `inner` columns side by side, read in rows.

    A unit is a tile: up to TILE columns of one row of blocks.
    table: counter, units, grain, source, target, size, inner, blocks, tiles, the MX constants.
    """
    width = bits // 8
    strip_bytes = STRIP * width
    spare_bytes = block * strip_bytes
    scratch_bytes = TILE // STRIP * SCRATCH

    @_inline
    def strips(target, source, pitch, height, count, scratch, constants) -> None:
        """Quantize `height` rows of `count` strips, the next row `pitch` bytes further on."""
        carry, emax, emin, top, lowest, steps = constants
        exact = 0
        for s in range(count):
            clear(scratch + s * SCRATCH, SCRATCH)
        for i in range(height):
            for s in range(count):
                strip_amax(scratch + s * SCRATCH, source + i * pitch + s * strip_bytes, bits)
        for s in range(count):
            exact |= strip_plan(scratch + s * SCRATCH, carry, emax, emin, top, lowest, bits)
        for i in range(height):
            for s in range(count):
                at, plan = i * pitch + s * strip_bytes, scratch + s * SCRATCH
                if exact:
                    strip_round(target + at, source + at, plan, steps, bits, 1)
                else:
                    strip_round(target + at, source + at, plan, steps, bits, 0)

    @_inline
    def part_of_strip(target, source, pitch, height, size, spare, scratch, constants) -> None:
        """Quantize less than a strip, `size` bytes wide, in a copy."""
        for i in range(height):
            copy(spare + i * strip_bytes, source + i * pitch, size)
        strips(spare, spare, strip_bytes, height, 1, scratch, constants)
        for i in range(height):
            copy(target + i * pitch, spare + i * strip_bytes, size)

    def columns(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, inner = field(table, 5), field(table, 6)
        blocks, tiles = field(table, 7), field(table, 8)
        constants = _constants(table)
        scratch, spare = stack(scratch_bytes), stack(spare_bytes)
        pitch = inner * width
        while True:
            first = claim(table, grain)
            if first >= units:
                return
            for unit in range(first, min(first + grain, units)):
                column = unit % tiles * TILE
                block_row = unit // tiles
                row = block_row % blocks * block
                height = min(block, size - row)
                at = ((block_row // blocks * size + row) * inner + column) * width
                used = min(TILE, inner - column)
                count = used // STRIP
                strips(target + at, source + at, pitch, height, count, scratch, constants)
                at += count * strip_bytes
                rest = used % STRIP * width
                if rest:
                    part_of_strip(
                        target + at, source + at, pitch, height, rest, spare, scratch, constants
                    )

    return columns


def hif8(bits: int) -> Callable[[int], None]:
    """Elements one by one. Units are rows of `size` elements, the last perhaps shorter.

    table: counter, units, grain, source, target, size, total elements, limit.
    """
    width = bits // 8
    run_bytes = RUN * width

    def runs(table) -> None:
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, total, limit = field(table, 5), field(table, 6), field(table, 7)
        scratch = stack(run_bytes)
        while True:
            first = claim(table, grain)
            if first >= units:
                return
            at = first * size * width
            end = min((first + grain) * size, total) * width
            while at + run_bytes <= end:
                hif8_run(target + at, source + at, limit, bits)
                at += run_bytes
            if at < end:
                clear(scratch, run_bytes)
                copy(scratch, source + at, end - at)
                hif8_run(scratch, scratch, limit, bits)
                copy(target + at, scratch, end - at)

    return runs
