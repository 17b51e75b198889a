"""How a tensor is cut into tiles, one for each program of the kernel."""

# ruff: noqa: N803  what is known at compile time has a name in capitals, as is Triton's custom
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
    index: int


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
    """What a program takes; `rows_first` where neighbors in memory are in neighboring rows."""

    rows: int
    columns: int
    rows_first: bool


class Plan(NamedTuple):
    """Tiles of a tensor, and the strides of its source, its result, and its draws' index."""

    sizes: Sizes
    x: Strides
    out: Strides
    index: Strides
    tile: Tile
    warps: int

    @property
    def programs(self) -> int:
        """How many tiles there are."""
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
) -> Plan | None:
    """Plan tiles with blocks along `axis`, anywhere if None.

    None for more dimensions than the kernel has, or more rows than it can count.
    """
    index_strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    dims = [_Dim(*d) for d in zip(shape, x_strides, out_strides, index_strides, strict=True)]
    along = None if axis is None else dims.pop(axis)
    others = _merged(dims)
    size = along or _take(others, across=None)
    # Squares lie in a matrix whose rows are in the tensor's own order; blocks can be in any.
    rows = others[-1] if side > 1 and others else _take(others, across=size)
    others += [] if rows in others else [rows]
    count = math.prod(dim.size for dim in others)
    if len(others) > 3 or count >= 2**31:
        return None
    outer, middle, inner = others + [_NO_DIM] * (3 - len(others))
    tile, warps = _tile(count, size.size, block, side, rows.size > 1 and rows.x < size.x)
    strides = (
        Strides(*d) for d in zip(*(d[1:] for d in (outer, middle, inner, size)), strict=True)
    )
    return Plan(Sizes(count, middle.size, inner.size, size.size), *strides, tile, warps)


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """Drop dimensions of one element, and join neighbors that are one in all their strides."""
    merged: list[_Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        if merged and all(a == b * dim.size for a, b in zip(merged[-1][1:], dim[1:], strict=True)):
            dim = _Dim(merged.pop().size * dim.size, *dim[1:])
        merged.append(dim)
    return merged


def _take(dims: list[_Dim], across: _Dim | None) -> _Dim:
    """Take out the dimension that is densest in memory; the largest, where `across` is dense."""
    if not dims:
        return _NO_DIM
    if across is not None and across.x == 1:
        taken = max(dims, key=lambda dim: dim.size)
    else:
        taken = min(dims, key=lambda dim: dim.x)
    dims.remove(taken)
    return taken


def _tile(rows: int, size: int, block: int, side: int, rows_first: bool) -> tuple[Tile, int]:
    """Return a tile, and its warps: 32 or 64 elements a thread, and runs of >= 128 bytes.

    A tile across memory has one warp for each 32 elements of a block, so that blocks of up to 32
    need no shared memory for their amax; larger ones have two, or registers would not suffice.
    """
    rows, size = triton.next_power_of_2(rows), triton.next_power_of_2(size)
    if rows_first:
        rows = max(side, min(rows, 64))
        return Tile(rows, block, True), max(1, rows * block // (2048 if block <= 32 else 1024))
    columns = max(block, min(size, max(1024 // side, 4096 // rows)))
    rows = max(side, min(rows, 4096 // columns))
    return Tile(rows, columns, False), max(1, rows * columns // 1024)


# -- on the device ---------------------------------------------------------------------------------


@triton.jit
def places(sizes, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the rows of this program's tile, [rows, 1], and its places in them, [1, columns]."""
    program = tl.program_id(0)
    if TILE.rows_first:  # neighbors in memory are neighbors in time
        row_tiles = (sizes.rows - 1) // TILE.rows + 1
        row_tile, size_tile = program % row_tiles, program // row_tiles
    else:
        size_tiles = (sizes.size - 1) // TILE.columns + 1
        row_tile, size_tile = program // size_tiles, program % size_tiles
    row = row_tile * TILE.rows + tl.arange(0, TILE.rows)[:, None]
    place = size_tile.to(tl.int64) * TILE.columns + tl.arange(0, TILE.columns)[None, :]
    return row, place


@triton.jit
def offset(row, place, sizes, strides) -> tl.tensor:
    """Return offsets in 64 bits, as a tensor may have more than 2^31 elements."""
    outer, inner = row // sizes.inner, row % sizes.inner
    rows = (outer // sizes.middle).to(tl.int64) * strides.outer
    rows += (outer % sizes.middle).to(tl.int64) * strides.middle
    return rows + inner.to(tl.int64) * strides.inner + place * strides.size
