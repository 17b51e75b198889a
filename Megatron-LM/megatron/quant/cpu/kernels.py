"""The loops around the inner steps, one function a kernel, and what a kernel's table holds.

A kernel takes the address of an int64 array and returns nothing. Several threads call it with the
same array: its first entry is a counter from which they take their work, `GRAIN` units at a time.
"""

from collections.abc import Callable

from .steps import (
    EXPONENT,
    HUGE,
    RUN,
    SCRATCH,
    STRIP,
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


def mx_rows(bits: int, block: int) -> Callable[[int], None]:
    """Blocks along the memory. Units are rows of `size` elements, the last perhaps shorter.

    table: counter, units, grain, source, target, size, total elements, and the MX constants.
    """
    width = bits // 8
    block_bytes = block * width

    def rows(table):
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, total = field(table, 5), field(table, 6)
        carry, emax, emin = field(table, 9), field(table, 10), field(table, 11)
        top, lowest, steps = field(table, 12), field(table, 13), field(table, 14)
        scratch = stack(block_bytes)
        while True:
            first = claim(table, grain)
            if first >= units:
                return
            for unit in range(first, min(first + grain, units)):
                end = min((unit + 1) * size, total)
                for start in range(unit * size, end, block):
                    inside = into = 0
                    short = end - start < block
                    if short:
                        clear(scratch, block_bytes)
                        copy(scratch, source + start * width, (end - start) * width)
                        inside = into = scratch
                    else:
                        inside, into = source + start * width, target + start * width
                    amax = block_amax(inside, bits, block)
                    scale = scale_of(amax, carry, emax)
                    if amax < HUGE and (scale >= lowest or amax == 0):
                        block_round(into, inside, scale + emin, scale + top, steps, bits, block, 0)
                    elif amax < EXPONENT:
                        block_round(into, inside, scale + emin, scale + top, steps, bits, block, 1)
                    else:
                        block_nan(into, bits, block)
                    if short:
                        copy(target + start * width, scratch, (end - start) * width)

    return rows


def mx_columns(bits: int, block: int) -> Callable[[int], None]:
    """Blocks across the memory, of `inner` columns side by side, read in rows.

    A unit is a tile: one strip of columns of one row of blocks.
    table: counter, units, grain, source, target, size, inner, blocks, strips, and the MX constants.
    """
    width = bits // 8
    strip_bytes = STRIP * width
    tile_bytes = block * strip_bytes

    def columns(table):
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, inner = field(table, 5), field(table, 6)
        blocks, strips = field(table, 7), field(table, 8)
        carry, emax, emin = field(table, 9), field(table, 10), field(table, 11)
        top, lowest, steps = field(table, 12), field(table, 13), field(table, 14)
        scratch, tile = stack(SCRATCH), stack(tile_bytes)
        pitch = inner * width
        while True:
            first = claim(table, grain)
            if first >= units:
                return
            for unit in range(first, min(first + grain, units)):
                column = unit % strips * STRIP
                block_row = unit // strips
                row = block_row % blocks * block
                height = min(block, size - row)
                start = ((block_row // blocks * size + row) * inner + column) * width
                inside, into, step = source + start, target + start, pitch
                used = min(STRIP, inner - column) * width
                if used < strip_bytes:
                    for i in range(height):
                        copy(tile + i * strip_bytes, inside + i * pitch, used)
                    inside, into, step = tile, tile, strip_bytes
                clear(scratch, STRIP * 4)
                for i in range(height):
                    strip_amax(scratch, inside + i * step, bits)
                if strip_plan(scratch, carry, emax, emin, top, lowest, bits):
                    for i in range(height):
                        strip_round(into + i * step, inside + i * step, scratch, steps, bits, 1)
                else:
                    for i in range(height):
                        strip_round(into + i * step, inside + i * step, scratch, steps, bits, 0)
                if used < strip_bytes:
                    for i in range(height):
                        copy(target + start + i * pitch, tile + i * strip_bytes, used)

    return columns


def hif8(bits: int) -> Callable[[int], None]:
    """Elements one by one. Units are rows of `size` elements, the last perhaps shorter.

    table: counter, units, grain, source, target, size, total elements, limit.
    """
    width = bits // 8
    run_bytes = RUN * width

    def runs(table):
        units, grain = field(table, 1), field(table, 2)
        source, target = field(table, 3), field(table, 4)
        size, total, limit = field(table, 5), field(table, 6), field(table, 7)
        scratch = stack(run_bytes)
        while True:
            first = claim(table, grain)
            if first >= units:
                return
            start = first * size
            end = min((first + grain) * size, total)
            while start + RUN <= end:
                hif8_run(target + start * width, source + start * width, limit, bits)
                start += RUN
            if start < end:
                copy(scratch, source + start * width, (end - start) * width)
                hif8_run(scratch, scratch, limit, bits)
                copy(target + start * width, scratch, (end - start) * width)

    return runs
