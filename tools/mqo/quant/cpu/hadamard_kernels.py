"""The loops around the steps of the Hadamard transform; kernels.py explains kernels.

table: counter, units, grain, source, target, size, padded, inner, total elements, signs, factor,
peak.

`size` is the length of the axis, and `padded` its length in the result. `signs` is an address and
`factor` a pattern, see hadamard_steps.py. `peak` becomes the pattern of the amax of the result.
"""

from collections.abc import Callable

from numba import types

from mqo.quant.cpu.hadamard_steps import (
    GROUP,
    LINE,
    emit_first_rows,
    emit_last_rows,
    emit_row,
    line_elements,
    span_of,
)
from mqo.quant.cpu.kernels import atomic_max, clear, copy, field, inline, over_units
from mqo.quant.cpu.steps import TILE, emit_block_amax, step

PEAK = 11  # its index in a table


def _keep_peak(bits: int) -> Callable:
    """Return a function that merges the vector of a thread's largest magnitudes into the table."""
    largest = step(emit_block_amax, types.int64, bits=bits, block=line_elements(bits))

    @inline
    def keep_peak(table, peak) -> None:
        value = largest(peak)
        if value > field(table, PEAK):  # rare, so threads seldom wait for each other
            atomic_max(table + 8 * PEAK, value)

    return keep_peak


def hadamard_rows(bits: int, points: int) -> Callable[[int], None]:
    """Transform blocks along the memory. Units are rows, of `padded` elements in the result.

    The last row may be shorter: there are `total` elements.
    """
    keep_peak = _keep_peak(bits)
    width, span = bits // 8, span_of(points, bits)
    transform = step(emit_row, bits=bits, points=points)

    @inline
    def row(table, unit, scratch) -> None:
        size, signs, factor = field(table, 5), field(table, 9), field(table, 10)
        source = field(table, 3) + unit * size * width
        target = field(table, 4) + unit * field(table, 6) * width
        peak = scratch + span * width
        clear(peak, LINE)
        count = min(size, field(table, 8) - unit * size)
        rest = count % span
        for at in range(0, (count - rest) * width, span * width):
            transform(target + at, source + at, signs, factor, peak)
        if rest:
            at = (count - rest) * width
            clear(scratch, span * width)
            copy(scratch, source + at, rest * width)
            transform(scratch, scratch, signs, factor, peak)
            copy(target + at, scratch, (rest + points - 1) // points * points * width)
        keep_peak(table, peak)

    return over_units(row, span * width + LINE)


def hadamard_columns(bits: int, points: int, stream: bool) -> Callable[[int], None]:
    """Transform blocks across the memory, in `inner` adjacent columns.

    A unit is a tile: up to TILE columns of one row of blocks. `stream` writes bypass the caches, to
    a target whose rows begin at multiples of LINE.
    """
    keep_peak = _keep_peak(bits)
    width, strip = bits // 8, line_elements(bits)
    together = _strips_together(points)
    spare = together * _strip_bytes(bits, points)
    peak_at = spare + points * LINE
    in_place, in_copy = _strips(bits, points, stream), _strips(bits, points, False)

    @inline
    def part(target, source, pitch, height, count, signs, factor, scratch) -> None:
        """Transform `count` columns, up to a strip, of `height` rows, in a copy."""
        rows = scratch + spare
        clear(rows, points * LINE)
        for i in range(height):
            copy(rows + i * LINE, source + i * pitch, count * width)
        in_copy(rows, rows, LINE, 1, signs, factor, scratch, scratch + peak_at)
        for i in range(points):
            copy(target + i * pitch, rows + i * LINE, count * width)

    @inline
    def tile(table, unit, scratch) -> None:
        size, padded, inner = field(table, 5), field(table, 6), field(table, 7)
        signs, factor = field(table, 9), field(table, 10)
        tiles, blocks = (inner + TILE - 1) // TILE, padded // points
        column, block_row = unit % tiles * TILE, unit // tiles
        outer, row = block_row // blocks, block_row % blocks * points
        height, used, pitch = min(points, size - row), min(TILE, inner - column), inner * width
        source = field(table, 3) + ((outer * size + row) * inner + column) * width
        target = field(table, 4) + ((outer * padded + row) * inner + column) * width
        peak = scratch + peak_at
        clear(peak, LINE)
        whole = used // strip if height == points else 0
        for s in range(0, whole, together):
            count, there, here = min(together, whole - s), target + s * LINE, source + s * LINE
            in_place(there, here, pitch, count, signs, factor, scratch, peak)
        for at in range(whole * strip, used, strip):
            count, there, here = min(strip, used - at), target + at * width, source + at * width
            part(there, here, pitch, height, count, signs, factor, scratch)
        keep_peak(table, peak)

    return over_units(tile, peak_at + LINE)


def _strips(bits: int, points: int, stream: bool) -> Callable:
    """Return a function that transforms adjacent strips of columns, using float32 in `scratch`."""
    strip_bytes = _strip_bytes(bits, points)
    row_bytes = strip_bytes // points
    first = step(emit_first_rows, bits=bits)
    last = step(emit_last_rows, bits=bits, points=points, stream=stream)

    @inline
    def strips(target, source, pitch, count, signs, factor, scratch, peak) -> None:
        """Transform `count` strips; rows are `pitch` bytes apart."""
        for row in range(0, points, GROUP):
            for s in range(count):
                registers = scratch + s * strip_bytes + row * row_bytes
                first(registers, source + row * pitch + s * LINE, pitch, signs + row * 4)
        for s in range(count):
            for row in range(GROUP):
                registers = scratch + s * strip_bytes + row * row_bytes
                last(target + row * pitch + s * LINE, registers, pitch, factor, peak)

    return strips


def _strip_bytes(bits: int, points: int) -> int:
    """Return the size of a strip's registers."""
    return points * (32 // bits) * LINE


def _strips_together(points: int) -> int:
    """Return the number of strips to read before any of them is written."""
    # Rows a power of two apart share few slots of a cache: with many rows, read more at once.
    return 1 if points == GROUP else 4
