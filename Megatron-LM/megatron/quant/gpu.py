"""The quantizers as Triton kernels, bit for bit the reference.

A program takes a tile of the tensor through the same steps for every format: load, amax of each
block, scale, round, store. Formats share them as far as their definitions do; what differs is in a
`Recipe`, which is known at compile time.

Everything is float32 arithmetic, which the definitions are, too. That asks for three things:

- Subnormals are kept. Triton compiles for a device without flushing them (a test looks for `.ftz`).
  In the interpreter, torch.set_flush_denormal(True) flushes them as it does the reference's.
- A division rounds to nearest: `div_rn`, since Triton's `/` does not.
- No product that rounds goes into a sum, where it could become a part of an fma: a clamp comes
  between. Products with powers of two are exact, and an fma of them is the same.

Largest magnitudes are compared as int32 patterns, where a NaN is the largest. Nothing waits for the
device, and everything may be captured in a CUDA graph. Under TRITON_INTERPRET=1, set before triton
is imported, the kernels run on CPU tensors, too.
"""

# ruff: noqa: N803  what is known at compile time has a name in capitals, as is Triton's custom
import functools
import math
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import ELEMENTS, SCALE_EXPONENT_MAX, SCALE_EXPONENT_MIN, Minifloat, TaperedFormat
from .scales import _E6M2, run_of
from .spec import QuantSpec


def _pattern(value: float) -> int:
    """Return the bits of a float32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


# -- what follows from a spec ----------------------------------------------------------------------


@dataclass(frozen=True)
class Element:
    """The values to round to.

    bits: of the mantissa. For a tapered element `widths` holds them instead: at bit |e| & 28, two
        bits for 2^e; else it is 0.
    smallest: the pattern of the power of two below which the steps stay as they are.
    top: what is larger is taken for this; a tapered element ends at `limit`, but rounds beyond it.
    infinite: whether what is beyond the limit becomes Infinity.
    signed_zero: whether a zero keeps its sign.
    """

    bits: int
    widths: int
    smallest: int
    top: float
    limit: float
    infinite: bool
    signed_zero: bool

    @classmethod
    def of(cls, element: Minifloat | TaperedFormat, overflow: str = "saturate") -> "Element":
        """Take over a row of formats.toml."""
        if isinstance(element, Minifloat):
            top, smallest = element.max_value, _pattern(2.0**element.emin)
            return cls(element.mantissa_bits, 0, smallest, top, top, False, not element.complement)
        widths = 0
        for exponent in range(0, 32, 4):
            width = next((bits for largest, bits in element.widths if exponent <= largest), 0)
            widths |= width << exponent
        smallest, limit = _pattern(2.0**element.min_exponent), 2.0**element.max_exponent
        return cls(0, widths, smallest, 2 * limit, limit, overflow == "inf", False)


_SCALE_ELEMENTS = {"two-level": Element.of(ELEMENTS["e4m3"]), "hif4": Element.of(_E6M2)}


@dataclass(frozen=True)
class Recipe:
    """What the kernel of a spec needs to know at compile time.

    scale: a kind of formats.toml; "power-of-two" is "e8m0" with the rule "rceil".
    emax: the exponent of the element's largest value; `carry` added to the pattern of an amax makes
        a significand that the scale rule rounds up carry into the exponent.
    run: elements in a row that share their scales; `side`: rows that do.
    exact: whether results have no more bits than bfloat16.
    scale_element: what the scale of a block is rounded to, where that is more than a power of two.
    """

    element: Element
    rounding: str
    scale: str
    emax: int
    carry: int
    run: int
    side: int
    exact: bool
    scale_element: Element | None


@functools.cache
def _recipe(spec: QuantSpec) -> Recipe:
    element, scale, rule = spec.format.element, spec.format.scale, spec.scale_rule
    if scale == "none" and spec.tensor_scale:
        scale = "tensor-power"
    if scale == "power-of-two":
        scale, rule = "e8m0", "rceil"
    tapered = isinstance(element, TaperedFormat)
    return Recipe(
        element=Element.of(element, spec.overflow),
        rounding=spec.rounding,
        scale=scale,
        emax=element.widths[0][0] if tapered else element.emax,
        carry=_carry(element, rule) if scale == "e8m0" else 0,
        run=run_of(spec) or 32,
        side=spec.block if spec.tile == "square" else 1,
        exact=scale in ("none", "tensor-power", "e8m0", "hif4"),
        scale_element=_SCALE_ELEMENTS.get(scale),
    )


def _carry(element: Minifloat, scale_rule: str) -> int:
    """Return 2^23 less the fraction field from which on the exponent of amax goes up."""
    return {
        "floor": 0,
        "rceil": 0x7FFFFF - (_pattern(element.max_value) & 0x7FFFFF),
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - element.mantissa_bits),
    }[scale_rule]


# -- numbers, on the device ------------------------------------------------------------------------

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_LOWEST_SCALE = tl.constexpr(SCALE_EXPONENT_MIN)
_HIGHEST_SCALE = tl.constexpr(SCALE_EXPONENT_MAX)


@triton.jit
def _as_float(pattern) -> tl.tensor:
    return pattern.to(tl.float32, bitcast=True)


@triton.jit
def _as_pattern(values) -> tl.tensor:
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _power_of_two(exponent) -> tl.tensor:
    """Return 2^exponent, for -127 <= exponent <= 127."""
    subnormal: tl.constexpr = 0x00400000
    return _as_float(tl.where(exponent == -127, subnormal, (exponent + 127) << 23))


@triton.jit
def _bfloat16_bits(pattern) -> tl.tensor:
    """Return the high half of the pattern, rounded to nearest even; a NaN may become a number."""
    return (pattern + (0x7FFF + ((pattern >> 16) & 1))) >> 16


@triton.jit
def _bfloat16(values) -> tl.tensor:
    """Round float32 to the values of bfloat16."""
    return _as_float(_bfloat16_bits(_as_pattern(values)) << 16)


@triton.jit
def _draw(index, seed) -> tl.tensor:
    """Return what the elements at `index` draw: stochastic.draws."""
    z = seed.to(tl.uint64) + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).to(tl.int32)


# -- rounding to an element's values, on the device ------------------------------------------------


@triton.jit
def _round(values, draw, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr) -> tl.tensor:
    """Round float32 to values of the element; tapered ones may be NaN, and pass."""
    if ELEMENT.widths:
        values = tl.clamp(values, -ELEMENT.top, ELEMENT.top, tl.PropagateNan.ALL)
    else:
        values = tl.clamp(values, -ELEMENT.top, ELEMENT.top)
    power = tl.maximum(_as_pattern(values) & _MAGNITUDE, ELEMENT.smallest) & _INFINITY
    if ELEMENT.widths:
        quantum = power - (((ELEMENT.widths >> (tl.abs((power >> 23) - 127) & 28)) & 3) << 23)
    else:
        quantum = power - (ELEMENT.bits << 23)
    if ROUNDING == "stochastic":
        rounded = _round_by_draw(values, quantum, draw)
    else:
        # A sum in this binade has units of a quantum, and taking the addend away again is exact.
        units = 1.5 * 2.0**23
        if ELEMENT.widths and ROUNDING == "nearest-even":
            # Ties go by the code's last bit, which alternates along the grid. Where there is no
            # mantissa, 2^e has the even code where e is odd: a unit more, and sums are as even.
            odd = ((power >> 23) + 1) & 1
            units += tl.where(quantum == power, odd, 0).to(tl.float32)
        if ROUNDING == "nearest-away":
            # This takes a tie up, and nothing else anywhere: halves of a quantum end in zeros.
            values = _as_float(_as_pattern(values) | 1)
        addend = _as_float(quantum) * units
        rounded = (values + addend) - addend
    if ELEMENT.limit < ELEMENT.top:
        if ELEMENT.infinite:
            infinity = rounded * float("inf")
            rounded = tl.where(tl.abs(rounded) > ELEMENT.limit, infinity, rounded)
        else:
            rounded = tl.clamp(rounded, -ELEMENT.limit, ELEMENT.limit, tl.PropagateNan.ALL)
    if ELEMENT.signed_zero:
        return _with_sign(rounded, values)
    elif ROUNDING == "stochastic":
        return rounded + 0.0  # what was -0.0 is 0.0
    else:
        return rounded


@triton.jit
def _with_sign(values, signed) -> tl.tensor:
    return _as_float(_as_pattern(values) | (_as_pattern(signed) & -0x80000000))


@triton.jit
def _round_by_draw(values, quantum, draw) -> tl.tensor:
    """Round up, in magnitude, where the draw is below the share of a quantum, in 2^-24."""
    inverse = _as_float((254 << 23) - quantum)
    steps = (tl.abs(values) * inverse * 2.0**24).to(tl.int32)
    rounded = ((steps + (0xFFFFFF - draw)) >> 24).to(tl.float32) * _as_float(quantum)
    return _with_sign(tl.where(values == values, rounded, values), values)


# -- scales, on the device: what multiplies a block's elements before and after --------------------


@triton.jit
def _nan_like(values) -> tl.tensor:
    return _as_float(tl.full(values.shape, 0x7FC00000, tl.int32))


@triton.jit
def _over(numerator: tl.constexpr, values) -> tl.tensor:
    return tl.div_rn(tl.full(values.shape, numerator, tl.float32), values)


@triton.jit
def _to_top(amax, TOP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Take an amax to TOP."""
    encode = tl.where(amax == 0, 1.0, tl.minimum(_over(TOP, _as_float(amax)), _LARGEST))
    encode = tl.where(amax < _INFINITY, encode, _nan_like(amax))
    return encode, _over(1.0, encode)


@triton.jit
def _e8m0(amax, EMAX: tl.constexpr, CARRY: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    # A subnormal's pattern is its multiple of 2^-149; as a float32 it is normal, and its exponent
    # is 149 too large.
    normal = tl.where(amax < _SMALLEST_NORMAL, _as_pattern(amax.to(tl.float32)) - (149 << 23), amax)
    exponent = ((normal + CARRY) >> 23) - (127 + EMAX)
    exponent = tl.minimum(tl.maximum(exponent, _LOWEST_SCALE), _HIGHEST_SCALE)
    finite, nan = amax < _INFINITY, _nan_like(amax)
    encode = tl.where(finite, _power_of_two(-exponent), nan)
    return encode, tl.where(finite, _power_of_two(exponent), nan)


@triton.jit
def _tensor_power(amax, EMAX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    exponent = tl.maximum((amax >> 23) - (127 + EMAX), _LOWEST_SCALE)
    exponent = tl.where((amax > 0) & (amax < _INFINITY), exponent, 0)
    return _power_of_two(-exponent), _power_of_two(exponent)


@triton.jit
def _two_level(
    amax, tensor_amax, TOP: tl.constexpr, ELEMENT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    finite = tensor_amax < _INFINITY
    total, inverse = _to_top(tl.where(finite, tensor_amax, 0), ELEMENT.top * TOP)
    inverse = tl.where(finite, inverse, _nan_like(inverse))
    share = total * (1 / TOP)  # one factor for both, as the published code has it: it rounds once
    amax = tl.where(amax > _INFINITY, 0, amax)
    decode = _round(_as_float(amax) * share, 0, ELEMENT, "nearest-even") * inverse
    return tl.minimum(_over(1.0, decode), _LARGEST), decode


@triton.jit
def _hif4(amax, ELEMENT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Give 64 elements a scale, each 8 of them a power of two, and each 4, whose amax it is, one.

    The scale is an E6M2.
    """
    fours = tl.reshape(amax, [amax.numel // 16, 8, 2])
    eights = tl.max(fours, axis=2, keep_dims=True)
    whole = tl.max(eights, axis=1, keep_dims=True)
    scale = _bfloat16(_as_float(whole) * 0.142578125)  # 1/7, a bfloat16
    scale = _round(tl.maximum(scale, 2.0**-48), 0, ELEMENT, "nearest-even")
    inverse = _bfloat16(_over(1.0, scale))
    eight = (_as_float(eights) * inverse >= 4.0).to(tl.int32)
    half = _as_float(_as_pattern(inverse) - (eight << 23))
    four = (_as_float(fours) * half >= 2.0).to(tl.int32)
    finite, nan = whole < _INFINITY, _nan_like(fours)
    encode = tl.where(finite, _as_float(_as_pattern(half) - (four << 23)), nan)
    decode = tl.where(finite, _as_float(_as_pattern(scale) + ((eight + four) << 23)), nan)
    return tl.reshape(encode, amax.shape), tl.reshape(decode, amax.shape)


@triton.jit
def _block_amax(tile, SIDE: tl.constexpr) -> tl.tensor:
    # Zeros beyond the tensor's end change neither an amax nor whether it is finite.
    amax = tl.max(_as_pattern(tile) & _MAGNITUDE, axis=3, keep_dims=True)
    return tl.max(amax, axis=1, keep_dims=True) if SIDE > 1 else amax


@triton.jit
def _factors(tile, tensor_amax, RECIPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return what multiplies the elements of a tile [.., side, runs, run], before and after."""
    if RECIPE.scale == "none":
        return 1.0, 1.0
    elif RECIPE.scale == "tensor-power":
        return _tensor_power(_as_pattern(tl.load(tensor_amax)), RECIPE.emax)
    elif RECIPE.scale == "tensor":
        return _to_top(_as_pattern(tl.load(tensor_amax)), RECIPE.element.top)
    elif RECIPE.scale == "e8m0":
        return _e8m0(_block_amax(tile, RECIPE.side), RECIPE.emax, RECIPE.carry)
    elif RECIPE.scale == "fp32":
        return _to_top(_block_amax(tile, RECIPE.side), RECIPE.element.top)
    elif RECIPE.scale == "two-level":
        whole = _as_pattern(tl.load(tensor_amax))
        amax = _block_amax(tile, RECIPE.side)
        return _two_level(amax, whole, RECIPE.element.top, RECIPE.scale_element)
    else:
        return _hif4(_block_amax(tile, RECIPE.side), RECIPE.scale_element)


# -- the kernel ------------------------------------------------------------------------------------


@triton.jit
def _offset(row, place, sizes, strides) -> tl.tensor:
    """Return offsets in 64 bits, as a tensor may have more than 2^31 elements."""
    outer, inner = row // sizes.inner, row % sizes.inner
    rows = (outer // sizes.middle).to(tl.int64) * strides.outer
    rows += (outer % sizes.middle).to(tl.int64) * strides.middle
    return rows + inner.to(tl.int64) * strides.inner + place * strides.size


@triton.jit(do_not_specialize=["seed", "index_strides"])
def _kernel(
    x,
    out,
    tensor_amax,
    seed,
    sizes,
    x_strides,
    out_strides,
    index_strides,
    TILE: tl.constexpr,
    RECIPE: tl.constexpr,
) -> None:
    """Quantize a tile of a tensor whose rows have `sizes.size` elements."""
    program = tl.program_id(0)
    if TILE.rows_first:  # neighbors in memory are neighbors in time
        row_tiles = (sizes.rows - 1) // TILE.rows + 1
        row_tile, size_tile = program % row_tiles, program // row_tiles
    else:
        size_tiles = (sizes.size - 1) // TILE.columns + 1
        row_tile, size_tile = program // size_tiles, program % size_tiles
    row = row_tile * TILE.rows + tl.arange(0, TILE.rows)[:, None]
    place = size_tile.to(tl.int64) * TILE.columns + tl.arange(0, TILE.columns)[None, :]
    inside = (row < sizes.rows) & (place < sizes.size)

    loaded = tl.load(x + _offset(row, place, sizes, x_strides), mask=inside, other=0)
    if loaded.dtype == tl.int16:  # bfloat16
        loaded = _as_float(loaded.to(tl.int32) << 16)
    draw = tl.zeros(loaded.shape, tl.int32)
    if RECIPE.rounding == "stochastic":
        draw = _draw(_offset(row, place, sizes, index_strides), seed)

    shape: tl.constexpr = [
        TILE.rows // RECIPE.side,
        RECIPE.side,
        TILE.columns // RECIPE.run,
        RECIPE.run,
    ]
    values = tl.reshape(loaded.to(tl.float32), shape)
    encode, decode = _factors(values, tensor_amax, RECIPE)
    values *= encode
    if RECIPE.scale == "hif4":
        values = _bfloat16(values)
    if tensor_amax is not None and not RECIPE.element.widths:
        # One that was given says nothing of a NaN here, for which these elements have no code.
        values = tl.where(values == values, values, 0.0)
    rounded = _round(values, tl.reshape(draw, shape), RECIPE.element, RECIPE.rounding)
    result = tl.reshape(rounded * decode, [TILE.rows, TILE.columns])
    target = out + _offset(row, place, sizes, out_strides)
    tl.store(target, _stored(result, out.dtype.element_ty, RECIPE.exact), mask=inside)


@triton.jit
def _stored(values, DTYPE: tl.constexpr, EXACT: tl.constexpr) -> tl.tensor:
    """Round to a dtype, to nearest even; int16 holds bfloat16."""
    pattern = _as_pattern(values)
    if DTYPE == tl.int16 and EXACT:  # noqa: SIM300
        return (pattern >> 16).to(tl.int16)
    elif DTYPE == tl.int16:  # noqa: SIM300
        nan: tl.constexpr = 0x7FC0
        return tl.where(values == values, _bfloat16_bits(pattern), nan).to(tl.int16)
    else:
        return values.to(DTYPE)


INTERPRETED = not isinstance(_kernel, triton.JITFunction)


# -- tiles -----------------------------------------------------------------------------------------


class _Dim(NamedTuple):
    """A dimension: its size, and its strides in the source, the result, and the draws' index."""

    size: int
    x: int
    out: int
    index: int


class _Strides(NamedTuple):
    outer: int
    middle: int
    inner: int
    size: int


class _Sizes(NamedTuple):
    """Sizes of a tensor [outer, middle, inner, size]; `rows` is the product of all but the last."""

    rows: int
    middle: int
    inner: int
    size: int


@dataclass(frozen=True)
class _Tile:
    rows: int
    columns: int
    rows_first: bool


class _Plan(NamedTuple):
    """How a tensor is cut into tiles; strides are in elements."""

    sizes: _Sizes
    x: _Strides
    out: _Strides
    index: _Strides
    tile: _Tile
    warps: int

    @property
    def programs(self) -> int:
        rows = triton.cdiv(self.sizes.rows, self.tile.rows)
        return rows * triton.cdiv(self.sizes.size, self.tile.columns)


_NO_DIM = _Dim(1, 0, 0, 0)


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    axis: int | None,
    block: int,
    side: int,
) -> _Plan | None:
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
        _Strides(*d) for d in zip(*(d[1:] for d in (outer, middle, inner, size)), strict=True)
    )
    return _Plan(_Sizes(count, middle.size, inner.size, size.size), *strides, tile, warps)


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


def _tile(rows: int, size: int, block: int, side: int, rows_first: bool) -> tuple[_Tile, int]:
    """Return a tile, and its warps: 32 or 64 elements a thread, and runs of >= 128 bytes.

    A tile across memory has one warp for each 32 elements of a block, so that blocks of up to 32
    need no shared memory for their amax.
    """
    rows, size = triton.next_power_of_2(rows), triton.next_power_of_2(size)
    if rows_first:
        rows = max(side, min(rows, 64))
        return _Tile(rows, block, True), max(1, rows * block // 2048)
    columns = max(block, min(size, max(1024 // side, 4096 // rows)))
    rows = max(side, min(rows, 4096 // columns))
    return _Tile(rows, columns, False), max(1, rows * columns // 1024)


# -- the launch ------------------------------------------------------------------------------------

_OF_THE_TENSOR = ("tensor", "tensor-power", "two-level")  # scales that follow from its amax


def qdq(
    x: Tensor,
    spec: QuantSpec,
    axis: int = -1,
    out: Tensor | None = None,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """What `backend.fake_quantize` returns, which checks the arguments.

    None for a tensor that is not on a CUDA device, unless in Triton's interpreter.
    """
    if not (x.is_cuda or INTERPRETED):
        return None
    target = torch.empty_like(x) if out is None else out
    seed = 0 if seed is None else seed
    if not x.numel() or _launch(x, target, spec, axis, seed, amax):
        return target
    dense = x.contiguous()  # a tensor of fewer dimensions, as its own can be merged
    result = torch.empty_like(dense)
    return target.copy_(result) if _launch(dense, result, spec, axis, seed, amax) else None


def _launch(
    x: Tensor, out: Tensor, spec: QuantSpec, axis: int, seed: int, amax: Tensor | None
) -> bool:
    """Write `x`, quantized, to `out`; False if its dimensions are too many for the kernel."""
    recipe = _recipe(spec)
    place = (axis, spec.block) if spec.block else (None, recipe.run)
    plan = _plan(x.shape, x.stride(), out.stride(), *place, recipe.side)
    if plan is None:
        return False
    if recipe.scale not in _OF_THE_TENSOR:
        amax = None
    elif amax is None:
        # One launch, which reads `x` once and does not wait; a NaN counts as the largest.
        amax = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
    seen = torch.int16 if x.dtype == torch.bfloat16 else x.dtype  # the interpreter rounds none
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _kernel[(plan.programs,)](
            x.view(seen),
            out.view(seen),
            amax,
            seed,
            plan.sizes,
            plan.x,
            plan.out,
            plan.index,
            TILE=plan.tile,
            RECIPE=recipe,
            num_warps=plan.warps,
        )
    return True
