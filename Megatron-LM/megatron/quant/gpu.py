"""The quantizers as Triton kernels: one read and one write of a tensor, bit for bit the reference.

Everything works on the bit patterns of float32, which hold bfloat16 and float16 exactly. Two ways
of rounding give the same bits:

- the exact one, on integers: any rounding, any magnitude.
- the fast one: a sum with 2^(q + 23), whose unit in the last place is 2^q, rounds to nearest-even
  on multiples of 2^q, and subtracting that again is exact. For nearest-away the last bit of x is
  set before: that takes a tie up and nothing else anywhere, as halves of a quantum end in zeros.
  This way is taken where operands and results are normal or round to zero, so that flushing
  subnormals (ftz) changes nothing. For mx that is a tile of moderate blocks; one with any other
  block goes the exact way.

Nothing waits for the device, and everything may be captured in a CUDA graph. Under
TRITON_INTERPRET=1, set before triton is imported, the kernels run on CPU tensors, too.
"""

# ruff: noqa: N803  what is known at compile time has a name in capitals, as is Triton's custom
import functools
import itertools
import math
import struct
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import SCALE_EXPONENT_MIN, Minifloat, TaperedFormat
from .spec import QuantSpec

# -- on the device -----------------------------------------------------------------------------

# The kernels below speak of |x| as the int32 pattern of a float32.
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_LARGEST_FINITE = tl.constexpr(0x7F7FFFFF)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_EXPONENT_ONE = tl.constexpr(1 << 23)
_TWO_TO_23 = tl.constexpr((127 + 23) << 23)

# A block of this amax rounds the fast way: 2^-80 <= amax < 2^100. The smallest quantum, of e5m2, is
# 2^-111 then, and the largest sum below 2^123.
_MODERATE_MIN = tl.constexpr((127 - 80) << 23)
_MODERATE_END = tl.constexpr((127 + 100) << 23)

# Shares of a step between two neighbors are whole multiples of 2^-24, as in stochastic.py.
_HALF = tl.constexpr(1 << 23)


@triton.jit
def _as_float(pattern) -> tl.tensor:
    return pattern.to(tl.float32, bitcast=True)


@triton.jit
def _as_pattern(values) -> tl.tensor:
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _to_pattern(values) -> tl.tensor:
    if values.dtype == tl.int16:  # bfloat16
        return values.to(tl.int32) << 16
    elif values.dtype == tl.float16:
        return _as_pattern(values.to(tl.float32))
    else:
        return values


@triton.jit
def _from_pattern(pattern, dtype: tl.constexpr) -> tl.tensor:
    if dtype == tl.int16:
        return (pattern >> 16).to(tl.int16)
    elif dtype == tl.float16:
        return _as_float(pattern).to(tl.float16)
    else:
        return pattern


@triton.jit
def _draw(index, seed) -> tl.tensor:
    """Return what the elements at `index` draw: stochastic.draws."""
    z = seed.to(tl.uint64) + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).to(tl.int32)


@triton.jit
def _exponent(magnitude) -> tl.tensor:
    """Return floor(log2 |x|), of subnormals too; -276 for zero."""
    # The pattern of a subnormal is its multiple of 2^-149, and as a float32 a normal one.
    converted = _as_pattern(magnitude.to(tl.float32)) >> 23
    return tl.where(magnitude < _SMALLEST_NORMAL, converted - 276, (magnitude >> 23) - 127)


@triton.jit
def _round_exact(magnitude, quantum, lift, draw, ROUNDING: tl.constexpr) -> tl.tensor:
    """Round finite |x| to a multiple of 2^quantum; `lift` 1 makes odd multiples the even ones.

    x's last bit is not above 2^quantum.
    """
    field = tl.maximum(magnitude >> 23, 1)
    significand = magnitude - ((field - 1) << 23)  # |x| = significand * 2^(field - 150)
    shift = tl.minimum(quantum + 150 - field, 48)  # beyond, less than 2^-24 of a step is left
    low = tl.minimum(shift, 24)
    steps = significand >> low
    share = ((significand - (steps << low)) << (24 - low)) >> (shift - low)
    if ROUNDING == "nearest-even":
        up = (share > _HALF) | ((share == _HALF) & (((steps + lift) & 1) == 1))
    elif ROUNDING == "nearest-away":
        up = share >= _HALF
    else:
        up = draw < share
    steps += up.to(tl.int32)
    # The leading bit of a significand adds the 1 that its field lacks; a carry, one more.
    rounded = tl.where(steps == 0, 0, (steps << low) + ((field - 1) << 23))
    # Far below the quantum, only a draw goes up.
    return tl.where((shift > 24) & up, (quantum + 127) << 23, rounded)


@triton.jit
def _mx_exact(
    magnitude, scale, draw, EMIN: tl.constexpr, BITS: tl.constexpr, ROUNDING: tl.constexpr
) -> tl.tensor:
    magnitude = tl.minimum(magnitude, _LARGEST_FINITE)
    quantum = tl.maximum(_exponent(magnitude), scale + EMIN) - BITS
    return _round_exact(magnitude, quantum, 0, draw, ROUNDING)


@triton.jit
def _mx_fast(
    magnitude, scale, EMIN: tl.constexpr, BITS: tl.constexpr, ROUNDING: tl.constexpr
) -> tl.tensor:
    # Negative where the block is zero, and then it does not matter.
    smallest = (scale + (EMIN + 127)) * _EXPONENT_ONE
    power = _as_float(tl.maximum(magnitude, smallest) & _INFINITY)
    if ROUNDING == "nearest-away":
        magnitude = magnitude | 1
    factor: tl.constexpr = 2.0 ** (23 - BITS)
    return _as_pattern((_as_float(magnitude) + power * factor) - power * factor)


@triton.jit
def _quantize_mx(
    pattern,
    draw,
    EMAX: tl.constexpr,
    EMIN: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    CARRY: tl.constexpr,
    ROUNDING: tl.constexpr,
) -> tl.tensor:
    """Return the patterns of a tile [ROWS, BLOCKS, BLOCK], quantized."""
    magnitude = pattern & 0x7FFFFFFF
    sign = pattern ^ magnitude
    amax = tl.max(magnitude, axis=2, keep_dims=True)
    # CARRY makes a significand that the scale rule rounds up carry into the exponent.
    scale = ((tl.minimum(amax, _INFINITY) + CARRY) >> 23) - (127 + EMAX)
    scale = tl.maximum(scale, -127)
    limit = scale * _EXPONENT_ONE + LIMIT
    if ROUNDING == "stochastic":
        rounded = tl.minimum(_mx_exact(magnitude, scale, draw, EMIN, BITS, ROUNDING), limit)
        result = tl.where(amax >= _INFINITY, _NAN, rounded | sign)
    else:
        moderate = (amax == 0) | ((amax >= _MODERATE_MIN) & (amax < _MODERATE_END))
        if tl.min(moderate.to(tl.int32)) == 1:
            rounded = tl.minimum(_mx_fast(magnitude, scale, EMIN, BITS, ROUNDING), limit)
            result = rounded | sign
        else:
            rounded = tl.minimum(_mx_exact(magnitude, scale, draw, EMIN, BITS, ROUNDING), limit)
            result = tl.where(amax >= _INFINITY, _NAN, rounded | sign)
    return result


@triton.jit
def _tapered_exact(
    pattern,
    scale,
    draw,
    EMAX: tl.constexpr,
    EMIN: tl.constexpr,
    BITS: tl.constexpr,
    NARROWER: tl.constexpr,
    SATURATE: tl.constexpr,
    ROUNDING: tl.constexpr,
) -> tl.tensor:
    magnitude = pattern & 0x7FFFFFFF
    # All beyond 2^(EMAX + 1) overflows alike. A scale above 1 keeps a tensor below.
    beyond = tl.minimum(scale + (EMAX + 128), 255) << 23
    clamped = tl.minimum(magnitude, tl.minimum(beyond, _LARGEST_FINITE))
    exponent = tl.minimum(tl.maximum(_exponent(clamped) - scale, EMIN), EMAX)
    narrower = (NARROWER >> (tl.abs(exponent) & 28)) & 3
    lift = (narrower == BITS).to(tl.int32) & exponent
    rounded = _round_exact(clamped, exponent + scale + narrower - BITS, lift, draw, ROUNDING)
    limit = tl.minimum(scale + (EMAX + 127), 255) << 23
    if SATURATE:
        rounded = tl.minimum(rounded, limit)
    else:
        rounded = tl.where(rounded > limit, _INFINITY, rounded)
    rounded = tl.where(magnitude > _INFINITY, _NAN, rounded)
    return tl.where(rounded == 0, 0, rounded | (pattern ^ magnitude))


@triton.jit
def _tapered_fast(
    pattern, EMAX: tl.constexpr, EMIN: tl.constexpr, SATURATE: tl.constexpr
) -> tl.tensor:
    """Round to nearest-away, with the widths of HiFloat8."""
    # All beyond 2^(EMAX + 1) overflows alike. The next 1 would make a NaN of Infinity.
    beyond: tl.constexpr = 2.0 ** (EMAX + 1)
    value = tl.clamp(_as_float(pattern), -beyond, beyond, tl.PropagateNan.ALL)
    value = _as_float(_as_pattern(value) | 1)
    # Below 2^EMIN the quantum stays.
    power = _as_pattern(tl.maximum(tl.abs(value), 2.0**EMIN)) & _INFINITY
    # The exponent e as a float: an integer in the last bits of 2^23 counts ones.
    exponent = _as_float((power >> 23) + _TWO_TO_23) - (2.0**23 + 127.0)
    # Three mantissa bits where |e| < 4, and one less each time that |e| doubles.
    doubling = _as_float(_as_pattern(tl.maximum(tl.abs(exponent), 2.0)) & _INFINITY)
    # 1.5 keeps the sum in the addend's binade, whatever the sign. A zero becomes positive.
    addend = _as_float(power) * (doubling * (1.5 * 2.0**19))
    rounded = (value + addend) - addend
    limit: tl.constexpr = 2.0**EMAX
    if SATURATE:
        result = _as_pattern(tl.clamp(rounded, -limit, limit, tl.PropagateNan.ALL))
    else:
        infinity = (pattern ^ (pattern & 0x7FFFFFFF)) | _INFINITY
        result = tl.where(tl.abs(rounded) > limit, infinity, _as_pattern(rounded))
    return result


@triton.jit
def _quantize_tapered(
    pattern,
    scale,
    draw,
    EMAX: tl.constexpr,
    EMIN: tl.constexpr,
    BITS: tl.constexpr,
    NARROWER: tl.constexpr,
    SATURATE: tl.constexpr,
    ROUNDING: tl.constexpr,
    SCALED: tl.constexpr,
) -> tl.tensor:
    """Return the patterns of a tile, quantized without blocks, and scaled by 2^scale."""
    if SCALED or ROUNDING != "nearest-away":
        return _tapered_exact(pattern, scale, draw, EMAX, EMIN, BITS, NARROWER, SATURATE, ROUNDING)
    else:
        return _tapered_fast(pattern, EMAX, EMIN, SATURATE)


@triton.jit(do_not_specialize=["seed", "i_outer0", "i_outer1", "i_row", "i_size"])
def _kernel(
    x,
    out,
    tensor_scale,
    seed,
    outer,
    rows,
    size,
    x_outer0,
    x_outer1,
    x_row,
    x_size,
    o_outer0,
    o_outer1,
    o_row,
    o_size,
    i_outer0,
    i_outer1,
    i_row,
    i_size,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    MX: tl.constexpr,
    EMAX: tl.constexpr,
    EMIN: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    TABLE: tl.constexpr,
    SATURATE: tl.constexpr,
    ROUNDING: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Quantize a tile [ROWS, BLOCKS, BLOCK] of a tensor [outer0, outer1, rows, size].

    Strides in elements: x_ of the source, o_ of the result, i_ of the index that an element draws
    by.
    """
    tile = tl.program_id(0)
    row_tiles = (rows - 1) // ROWS + 1
    size_tiles = (size - 1) // (BLOCKS * BLOCK) + 1
    if ROWS_FIRST:  # neighbors in memory are neighbors in time
        row_tile = tile % row_tiles
        size_tile = tile // row_tiles % size_tiles
    else:
        size_tile = tile % size_tiles
        row_tile = tile // size_tiles % row_tiles
    outermost = tile // (row_tiles * size_tiles)
    first = (outermost // outer).to(tl.int64)
    second = (outermost % outer).to(tl.int64)

    # Offsets in 64 bits: a tensor may have more than 2^31 elements.
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    within = tl.arange(0, BLOCKS)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    place = size_tile.to(tl.int64) * (BLOCKS * BLOCK) + within
    inside = (row < rows) & (place < size)
    source = x + first * x_outer0 + second * x_outer1 + row * x_row + place * x_size
    target = first * o_outer0 + second * o_outer1 + row * o_row + place * o_size

    # Zeros change neither a block's amax nor whether it is finite.
    pattern = _to_pattern(tl.load(source, mask=inside, other=0))
    draw = 0
    if ROUNDING == "stochastic":
        draw = _draw(first * i_outer0 + second * i_outer1 + row * i_row + place * i_size, seed)
    if MX:
        result = _quantize_mx(pattern, draw, EMAX, EMIN, BITS, LIMIT, TABLE, ROUNDING)
    else:
        scale = tl.full([], 0, tl.int32)
        if SCALED:
            scale = tl.load(tensor_scale)
        result = _quantize_tapered(
            pattern, scale, draw, EMAX, EMIN, BITS, TABLE, SATURATE, ROUNDING, SCALED
        )
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + target, _from_pattern(result, dtype), mask=inside)


# -- constants of the formats ------------------------------------------------------------------


def _float32_pattern(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


@functools.cache
def _constants(spec: QuantSpec) -> dict[str, Any]:
    """Return the constexpr arguments that follow from the spec."""
    element = spec.format.element
    if spec.block is None:
        constants = _tapered_constants(element)
    else:
        constants = _mx_constants(element, spec.scale_rule)
    return constants | {
        "SATURATE": spec.overflow == "saturate",
        "ROUNDING": spec.rounding,
        "SCALED": spec.block is None and spec.tensor_scale,
    }


def _mx_constants(element: Minifloat, scale_rule: str) -> dict[str, Any]:
    top = _float32_pattern(element.max_value) & 0x7FFFFF
    carry = {  # from which fraction field on the exponent of amax goes up: 2^23 minus that
        "floor": 0,
        "rceil": 0x7FFFFF - top,
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - element.mantissa_bits),
    }
    return {
        "MX": True,
        "EMAX": element.emax,
        "EMIN": element.emin,
        "BITS": element.mantissa_bits,
        "LIMIT": _float32_pattern(element.max_value),
        "TABLE": carry[scale_rule],
    }


def _tapered_constants(fmt: TaperedFormat) -> dict[str, Any]:
    """TABLE holds at bit |e| & 28 how much narrower than the widest a mantissa at 2^e is."""
    bits = fmt.widths[0][1]
    widths = {e: next((w for largest, w in fmt.widths if e <= largest), 0) for e in range(0, 32, 4)}
    return {
        "MX": False,
        "EMAX": fmt.max_exponent,
        "EMIN": fmt.min_exponent,
        "BITS": bits,
        "LIMIT": 0,
        "TABLE": sum((bits - width) << e for e, width in widths.items()),
    }


# -- the launch --------------------------------------------------------------------------------

INTERPRETED = not isinstance(_kernel, triton.JITFunction)

# A value of each dtype as the kernel shall see it: one of _to_pattern's.
_SEEN_AS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.float16,
}


class _Dim(NamedTuple):
    """A dimension: its size, and its strides in the source, the result, and the draws' index."""

    size: int
    x: int
    out: int
    index: int


class _Plan(NamedTuple):
    """How a tensor [outer0, outer1, rows, size] is cut into tiles [ROWS, BLOCKS, BLOCK]."""

    dims: tuple[_Dim, _Dim, _Dim, _Dim]
    tile: tuple[int, int, int]
    warps: int
    rows_first: bool

    @property
    def programs(self) -> int:
        outer0, outer1, rows, size = (dim.size for dim in self.dims)
        height, blocks, block = self.tile
        return outer0 * outer1 * triton.cdiv(rows, height) * triton.cdiv(size, blocks * block)


_NO_DIM = _Dim(1, 0, 0, 0)


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    axis: int | None,
    block: int,
) -> _Plan | None:
    """Plan tiles with blocks along `axis`, anywhere if None; None for too many dimensions."""
    index_strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    dims = [_Dim(*d) for d in zip(shape, x_strides, out_strides, index_strides, strict=True)]
    bounds = [-1, len(dims)] if axis is None else [-1, axis % len(dims), len(dims)]
    others = [d for a, b in itertools.pairwise(bounds) for d in _merged(dims[a + 1 : b])]
    size = _take(others, across=None) if axis is None else dims[axis]
    rows = _take(others, across=size)
    if len(others) > 2:
        return None
    outer0, outer1 = [_NO_DIM] * (2 - len(others)) + others
    rows_first = rows.size > 1 and rows.x < size.x
    tile, warps = _tile(rows.size, size.size, block, rows_first)
    return _Plan((outer0, outer1, rows, size), tile, warps, rows_first)


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


def _tile(rows: int, size: int, block: int, rows_first: bool) -> tuple[tuple[int, int, int], int]:
    """Return the tile's shape, and its warps: 32 or 64 elements a thread, and runs of >= 128 bytes.

    A tile across memory has one warp for each 32 elements of a block, so that blocks of up to 32
    need no shared memory for their amax.
    """
    rows, size = triton.next_power_of_2(rows), triton.next_power_of_2(size)
    if rows_first:
        return (min(rows, 64), 1, block), max(1, block // 32)
    columns = max(block, min(size, max(1024, 4096 // rows)))
    rows = min(rows, 4096 // columns)
    return (rows, columns // block, block), max(1, rows * columns // 1024)


def _launch(x: Tensor, out: Tensor, spec: QuantSpec, axis: int, seed: int) -> None:
    """Write `x`, quantized, to `out`."""
    if not x.numel():
        return
    place = (axis, spec.block) if spec.block else (None, 32)
    plan = _plan(x.shape, x.stride(), out.stride(), *place)
    if plan is None:
        dense = x.contiguous()
        result = torch.empty_like(dense)
        _launch(dense, result, spec, axis, seed)
        out.copy_(result)
        return
    constants = _constants(spec)
    seen = _SEEN_AS[x.dtype]
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _kernel[(plan.programs,)](
            x.view(seen),
            out.view(seen),
            _tensor_exponent(x, spec.format.element) if constants["SCALED"] else None,
            seed,
            *(dim.size for dim in plan.dims[1:]),
            *(dim.x for dim in plan.dims),
            *(dim.out for dim in plan.dims),
            *(dim.index for dim in plan.dims),
            *plan.tile,
            ROWS_FIRST=plan.rows_first,
            num_warps=plan.warps,
            **constants,
        )


def _tensor_exponent(x: Tensor, element: TaperedFormat) -> Tensor:
    """Return the exponent of a tensor scale, int32 on x's device: reference.py's."""
    low, high = x.aminmax()
    pattern = torch.maximum(-low, high).float().view(torch.int32)
    exponent = ((pattern >> 23) - 127 - element.widths[0][0]).clamp(min=SCALE_EXPONENT_MIN)
    return torch.where((pattern > 0) & (pattern < _float32_pattern(math.inf)), exponent, 0)


# -- operators ---------------------------------------------------------------------------------

# A spec goes in as its fields, since an operator takes no objects, and a seed as a signed number.
# They are defined one level below torch.library.custom_op, whose checks of every call cost more
# than the launch.
_SPEC = "str quant_type, int? block, str scale_rule, str rounding, str overflow, bool tensor_scale"
_define = torch.library.define
_define("megatron_quant::qdq", f"(Tensor x, int axis, int seed, {_SPEC}) -> Tensor")
_define("megatron_quant::qdq_out", f"(Tensor x, Tensor(a!) out, int axis, int seed, {_SPEC}) -> ()")

_spec = functools.cache(QuantSpec)


@torch.library.impl("megatron_quant::qdq", "CompositeExplicitAutograd")
def _qdq(x: Tensor, axis: int, seed: int, *fields: Any) -> Tensor:
    out = torch.empty_like(x)
    _launch(x, out, _spec(*fields), axis, seed)
    return out


@torch.library.impl("megatron_quant::qdq_out", "CompositeExplicitAutograd")
def _qdq_out(x: Tensor, out: Tensor, axis: int, seed: int, *fields: Any) -> None:
    _launch(x, out, _spec(*fields), axis, seed)


@torch.library.register_fake("megatron_quant::qdq")
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("megatron_quant::qdq_out")
def _(x: Tensor, out: Tensor, *_: Any) -> None:
    return None


def _fields(spec: QuantSpec) -> tuple[Any, ...]:
    choices = (spec.block, spec.scale_rule, spec.rounding, spec.overflow, spec.tensor_scale)
    return (spec.quant_type, *choices)


def _signed(seed: int | None) -> int:
    return 0 if seed is None else seed - 2**64 if seed >= 2**63 else seed


def qdq(
    x: Tensor,
    spec: QuantSpec,
    axis: int = -1,
    out: Tensor | None = None,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """What `backend.fake_quantize` returns, which checks the arguments.

    None for a tensor that is not on a CUDA device, unless in Triton's interpreter, and for formats
    that have no kernel.
    """
    mx = spec.format.is_mx and not spec.format.element.complement
    if not (x.is_cuda or INTERPRETED) or not (mx or spec.format.element.name == "hif8"):
        return None
    arguments = (axis, _signed(seed), *_fields(spec))
    if out is None:
        return torch.ops.megatron_quant.qdq(x, *arguments)
    torch.ops.megatron_quant.qdq_out(x, out, *arguments)
    return out
