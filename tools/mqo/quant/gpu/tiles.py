"""Split a tensor into tiles, one for each program of the kernel."""

# ruff: noqa: N803  names of compile-time values are in capitals, as is usual with Triton
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl


class _Dim(NamedTuple):
    """A dimension: its size, and its strides in the source, the result, and the draws' index."""

    size: int
    x: int
    out: int
    draws: int


class Strides(NamedTuple):
    """Strides of a tensor [outer, middle, inner, size], in elements."""

    outer: int
    middle: int
    inner: int
    size: int


class Sizes(NamedTuple):
    """Sizes of a tensor [outer, middle, inner, size]; `rows` is the product of all but the last."""

    rows: int
    middle: int
    inner: int
    size: int


@dataclass(frozen=True)
class Tile:
    """The tile of a program; `rows_first` if neighbors in memory are in neighboring rows.

    Columns are dealt to `hands` in turn, so that a thread, to which Triton assigns distant columns,
    has neighbors in a block. With 1, columns stay in order.
    """

    rows: int
    columns: int
    rows_first: bool
    hands: int = 1


class TilePlan(NamedTuple):
    """Tiles of a tensor, and the strides of its source, its result, and its draws' index."""

    sizes: Sizes
    x: Strides
    out: Strides
    draws: Strides
    tile: Tile
    warps: int

    @property
    def programs(self) -> int:
        """The number of tiles."""
        rows = triton.cdiv(self.sizes.rows, self.tile.rows)
        return rows * triton.cdiv(self.sizes.size, self.tile.columns)


_NO_DIM = _Dim(1, 0, 0, 0)


@functools.lru_cache(maxsize=1024)
def plan_tiles(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    axis: int | None,
    block: int,
    side: int,
) -> TilePlan | None:
    """Plan tiles with blocks along `axis`, or along any axis if None.

    Return None for more dimensions than the kernel supports, or more rows than it can count.
    """
    index_strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    dims = [_Dim(*d) for d in zip(shape, x_strides, out_strides, index_strides, strict=True)]
    along = None if axis is None else dims.pop(axis)
    others = _merged(dims)
    size = along or _take(others, across=None)
    # Squares need a matrix whose rows are in the order of the tensor; blocks allow any order.
    rows = others[-1] if side > 1 and others else _take(others, across=size)
    others += [] if rows in others else [rows]
    count = math.prod(dim.size for dim in others)
    if len(others) > 3 or count >= 2**31:
        return None
    outer, middle, inner = others + [_NO_DIM] * (3 - len(others))
    tile, warps = _tile(count, size.size, block, side, rows.size > 1 and rows.x < size.x)
    x, out, draws = (
        Strides(*d) for d in zip(*(d[1:] for d in (outer, middle, inner, size)), strict=True)
    )
    return TilePlan(Sizes(count, middle.size, inner.size, size.size), x, out, draws, tile, warps)


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """Drop dimensions of one element, and merge neighbors whose strides allow it."""
    merged: list[_Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        if merged and all(a == b * dim.size for a, b in zip(merged[-1][1:], dim[1:], strict=True)):
            dim = _Dim(merged.pop().size * dim.size, *dim[1:])
        merged.append(dim)
    return merged


def _take(dims: list[_Dim], across: _Dim | None) -> _Dim:
    """Remove and return the densest dimension in memory, or the largest if `across` is dense."""
    if not dims:
        return _NO_DIM
    if across is not None and across.x == 1:
        taken = max(dims, key=lambda dim: dim.size)
    else:
        taken = min(dims, key=lambda dim: dim.x)
    dims.remove(taken)
    return taken


def _tile(rows: int, size: int, block: int, side: int, rows_first: bool) -> tuple[Tile, int]:
    """Return a tile, and its warps: 32 or 64 elements per thread, and runs of at least 64 bytes.

    A tile across memory has one warp for blocks of up to 64, which then need no shared memory for
    their amax; larger blocks need more warps, because of the registers.
    """
    whole = size & -size  # the largest power of two that divides the row length
    rows, size = triton.next_power_of_2(rows), triton.next_power_of_2(size)
    if rows_first and block > 64:
        rows = max(side, min(rows, 64))
        return Tile(rows, block, True), max(1, rows * block // 1024)
    if rows_first:
        rows = max(side, min(rows, 2048 // block))
        return Tile(rows, block, True, 8 if block == 64 else 1), max(1, rows * block // 2048)
    # A tile of one row needs the fewest instructions for its addresses.
    least = min(whole, 4096) if side == 1 and whole >= 2048 else 1024 // side
    columns = max(block, min(size, max(least, 4096 // rows)))
    rows = max(side, min(rows, 4096 // columns))
    return Tile(rows, columns, False), max(1, rows * columns // 1024)


# -- on the device ---------------------------------------------------------------------------------


@triton.jit
def positions(sizes, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the rows of this program's tile, [rows, 1], and positions in them, [1, columns]."""
    program = tl.program_id(0)
    if TILE.rows_first:  # neighbors in memory are neighbors in time
        row_tiles = (sizes.rows - 1) // TILE.rows + 1
        row_tile, size_tile = program % row_tiles, program // row_tiles
    else:
        size_tiles = (sizes.size - 1) // TILE.columns + 1
        row_tile, size_tile = program // size_tiles, program % size_tiles
    row = row_tile * TILE.rows + tl.arange(0, TILE.rows)[:, None]
    column = tl.arange(0, TILE.columns)
    if TILE.hands > 1:
        column = (column % TILE.hands) * (TILE.columns // TILE.hands) + column // TILE.hands
    position = size_tile.to(tl.int64) * TILE.columns + column[None, :]
    return row, position


@triton.jit
def in_order(values, TILE: tl.constexpr) -> tl.tensor:
    """Reorder the columns of a tile from the order of `positions` to their natural order."""
    return _regrouped(values, TILE.columns // TILE.hands, TILE.hands)


@triton.jit
def dealt(values, TILE: tl.constexpr) -> tl.tensor:
    """Reorder the columns of a tile from their natural order to that of `positions`."""
    return _regrouped(values, TILE.hands, TILE.columns // TILE.hands)


@triton.jit
def _regrouped(values, GROUPS: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Take the first of each group of columns, then the second of each, and so on."""
    if GROUPS == 1 or SIZE == 1:
        return values
    else:
        grouped = tl.reshape(values, [values.shape[0], GROUPS, SIZE])
        return tl.reshape(tl.trans(grouped, 0, 2, 1), values.shape)


@triton.jit
def offset(row, position, sizes, strides) -> tl.tensor:
    """Return 64-bit offsets, since a tensor may have more than 2^31 elements."""
    return of_row(row, sizes, strides) + position * strides.size


@triton.jit
def of_row(row, sizes, strides) -> tl.tensor:
    """Return the offsets of rows."""
    outer, inner = row // sizes.inner, row % sizes.inner
    rows = (outer // sizes.middle).to(tl.int64) * strides.outer
    rows += (outer % sizes.middle).to(tl.int64) * strides.middle
    return rows + inner.to(tl.int64) * strides.inner
