"""The quantizers for the CPU, compiled by numba: every format, rounding and kind of scale.

They compute the same bits as the reference for every input, and need no C compiler. Under
torch.set_flush_denormal(True) they differ: only a tensor's scale uses flushed values.
"""

from __future__ import annotations

import functools
import math
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mqo.quant.cpu import kernels
from mqo.quant.cpu.arithmetic import EXPONENT, UNIT, Scheme
from mqo.quant.cpu.compile import kernel
from mqo.quant.cpu.memory import GRAIN, NARROW, ROW, is_usable
from mqo.quant.cpu.steps import RUN, TILE, VECTOR
from mqo.quant.cpu.threads import launch
from mqo.quant.formats import TaperedFormat
from mqo.quant.scales import carry_of, pattern, tensor_factors
from mqo.quant.stochastic import signed
from mqo.quant.strides import is_dense, memory_order

if TYPE_CHECKING:
    from mqo.quant.spec import QuantSpec


def qdq(
    x: Tensor,
    spec: QuantSpec,
    axis: int = -1,
    out: Tensor | None = None,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """Quantize as `backend.fake_quantize`, which checks the arguments; return None if unsupported.

    Unsupported are tapered formats with nearest-even, tapered elements other than HiFloat8's, and
    tensors whose memory `is_usable` refuses. `out` may be `x`, but must not overlap it otherwise.
    """
    if not _supported(x, spec, axis) or not (out is None or is_usable(out)):
        return None
    target = torch.empty_like(x) if out is None else out
    if x.numel() == 0:
        return target
    x, result = x.detach(), target.detach()
    half = x.dtype == torch.float16
    x = x.float() if half else x
    scales = _tensor_scales(x, spec, amax)
    if half:
        result.copy_(_in_place(x, spec, axis, scales, seed))
    elif not is_dense(result):
        result.copy_(_in_place(x.clone(), spec, axis, scales, seed))
    elif x.stride() != result.stride():
        _in_place(result.copy_(x), spec, axis, scales, seed)
    else:
        _dense(x, result, spec, axis, scales, seed)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)  # autograd did not see the write
    return target


def _supported(x: Tensor, spec: QuantSpec, axis: int) -> bool:
    element = spec.format.element
    tapered = isinstance(element, TaperedFormat)
    drawn_squares = spec.tile == "square" and spec.rounding == "stochastic"
    return (
        not (tapered and (element.name != "hif8" or spec.rounding == "nearest-even"))
        and not (drawn_squares and 0 < axis % x.dim() < x.dim() - 1)
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and is_usable(x)
    )


def _in_place(x: Tensor, *arguments: Any) -> Tensor:
    """Quantize a dense tensor in place, and return it."""
    _dense(x, x, *arguments)
    return x


def _dense(
    x: Tensor, out: Tensor, spec: QuantSpec, axis: int, scales: _Scales, seed: int | None
) -> None:
    """Quantize `x` into `out`, both dense and with the same strides."""
    if spec.rounding == "stochastic" and not x.is_contiguous():
        # Draws depend on the index, which is the position in memory of a contiguous tensor.
        out.copy_(_in_place(x.contiguous(), spec, axis, scales, seed))
        return
    scheme = _scheme(spec)
    constants = (*_constants(spec), *scales, signed(seed or 0))
    if scheme == Scheme("none", "nearest-away", "tapered"):
        _hif8(x, out, constants[_TOP])
        return
    if spec.block is None:
        _rows(x, out, scheme, constants, RUN, x.numel())
        return
    width = _matrix_width(x, axis) if spec.tile == "square" else None
    order = memory_order(x)
    sizes = [x.shape[i] for i in order]
    position = order.index(axis % x.dim())
    size, inner = sizes[position], prod(sizes[position + 1 :])
    if width:
        _squares(x, out, scheme, constants, spec.block, width)
    elif spec.tile == "square" or (1 < inner < NARROW and spec.rounding != "stochastic"):
        moved = x.movedim(axis, -1).contiguous()
        out.copy_(_in_place(moved, spec, -1, scales, seed).movedim(-1, axis))
    elif inner == 1:
        _rows(x, out, scheme, constants, spec.block, size)
    else:
        _columns(x, out, scheme, constants, spec.block, size, inner)


def _matrix_width(x: Tensor, axis: int) -> int | None:
    """Return the row length of `x` in memory, seen as a matrix of `axis` and all other axes.

    None if memory has no such order. `axis` may be the rows or the columns, because square blocks
    of the transposed matrix are the same.
    """
    if x.movedim(axis, -1).is_contiguous():
        return x.shape[axis]
    return x.numel() // x.shape[axis] if x.movedim(axis, 0).is_contiguous() else None


def _hif8(x: Tensor, out: Tensor, top: int) -> None:
    bits = 8 * x.itemsize
    pointers = (x.data_ptr(), out.data_ptr())
    units = -(-x.numel() // ROW)
    entries = (*pointers, ROW, x.numel(), top >> (32 - bits))
    launch(kernel(kernels.hif8, bits), units, GRAIN // ROW, *entries)


_Ints = tuple[int, ...]


def _rows(x: Tensor, out: Tensor, scheme: Scheme, constants: _Ints, block: int, size: int) -> None:
    total = x.numel()
    if size == total or size % block == 0:
        size = ROW  # a multiple of the block, so that any cut of memory into such rows is valid
    units, grain = -(-total // size), -(-GRAIN // size)
    entries = (x.data_ptr(), out.data_ptr(), size, total, 0, 0, *constants)
    launch(kernel(kernels.rows, 8 * x.itemsize, block, scheme), units, grain, *entries)


def _squares(
    x: Tensor, out: Tensor, scheme: Scheme, constants: _Ints, block: int, width: int
) -> None:
    height = x.numel() // width
    if 8 * x.itemsize * block <= VECTOR:  # several squares at once, for longer reads
        _columns(x, out, scheme, constants, block, height, width, side=block)
        return
    units, grain = -(-height // block), -(-GRAIN // (block * width))
    entries = (x.data_ptr(), out.data_ptr(), width, height, 0, 0, *constants)
    launch(kernel(kernels.squares, 8 * x.itemsize, block, scheme), units, grain, *entries)


def _columns(
    x: Tensor,
    out: Tensor,
    scheme: Scheme,
    constants: _Ints,
    block: int,
    size: int,
    inner: int,
    side: int = 1,
) -> None:
    total = x.numel()
    blocks, tiles = -(-size // block), -(-inner // TILE)
    units = total // (size * inner) * blocks * tiles
    grain = -(-GRAIN // (block * min(TILE, inner)))
    entries = (x.data_ptr(), out.data_ptr(), size, inner, blocks, tiles, *constants)
    launch(kernel(kernels.columns, 8 * x.itemsize, block, scheme, side), units, grain, *entries)


# -- constants ---------------------------------------------------------------------------------

_Scales = tuple[int, int, int]  # the constants `first` to `third` of arithmetic.py
_TOP = 2


@functools.cache
def _scheme(spec: QuantSpec) -> Scheme:
    element, scale = spec.format.element, spec.format.scale
    if isinstance(element, TaperedFormat):
        return Scheme("tensor" if spec.tensor_scale else scale, spec.rounding_mode, "tapered")
    if scale == "power-of-two":
        scale = "e8m0"
    kind = "complement" if element.complement else "minifloat"
    return Scheme(scale, spec.rounding_mode, kind, spec.format.block_scale, spec.four_over_six)


@functools.cache
def _constants(spec: QuantSpec) -> _Ints:
    """Return carry, emax, top, floor and steps; see arithmetic.py."""
    element = spec.format.element
    if isinstance(element, TaperedFormat):
        top = EXPONENT if spec.overflow == "inf" else pattern(element.max_value)
        return (0, 0, top, 0, 0)
    return (
        carry_of(spec),
        element.emax * UNIT,
        pattern(element.max_value),
        pattern(2.0**element.emin),
        (23 - element.mantissa_bits) * UNIT,
    )


def _tensor_scales(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> _Scales:
    """Compute `first` to `third` from the tensor's amax, as defined in scales.py."""
    if spec.format.scale == "one-level":  # two levels, and a tensor whose scale is 1
        share = 1 / spec.format.minifloat.max_value
        return (pattern(share), pattern(1.0), pattern(1.0))
    if not spec.scales_by_tensor:
        return (0, 0, 0)
    up, down = tensor_factors(float(_tensor_amax(x)) if amax is None else amax.item(), spec)
    kept = 1.0 if spec.without_alpha and not math.isnan(down) else down
    return (pattern(up), pattern(down), pattern(kept))


def _tensor_amax(x: Tensor) -> np.float32:
    if not is_dense(x):
        x = x.contiguous()
    units = -(-x.numel() // ROW)
    entries = (x.data_ptr(), 0, ROW, x.numel(), 0)
    table = launch(kernel(kernels.amax, 8 * x.itemsize), units, GRAIN // ROW, *entries)
    return np.int64(table[7]).astype(np.int32).view(np.float32)
