"""The quantizers for the CPU, compiled by numba: nearest rounding of every format, without scales.

They give the reference's bits for every input, and need no C compiler. Unlike the reference they
give them under torch.set_flush_denormal(True), too, as if it were not set.
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats import Minifloat
from .compile import kernel
from .steps import EXPONENT, TILE, UNIT
from .threads import launch

if TYPE_CHECKING:
    from ..spec import QuantSpec

_ROW = 1 << 12  # elements of a row where the memory has no rows of its own; a multiple of any block
_GRAIN = 1 << 16  # elements that a thread takes at a time
_NARROW = 16  # fewer columns than this side by side are turned into rows first
_MAX_HIF8 = 0x47000000  # the pattern of 2^15


def qdq(
    x: Tensor,
    spec: QuantSpec,
    axis: int = -1,
    out: Tensor | None = None,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """What `backend.fake_quantize` returns, which checks the arguments; None: not supported.

    Not supported are stochastic and other unusual roundings, a tensor scale, and tensors that are
    not plain ones in this machine's memory. `out` may be `x`, not overlap it otherwise.
    """
    if not _supported(x, spec) or not (out is None or _plain(out)):
        return None
    target = torch.empty_like(x) if out is None else out
    if x.numel() == 0:
        return target
    x, result = x.detach(), target.detach()
    if x.dtype == torch.float16:
        result.copy_(_in_place(x.float(), spec, axis))
    elif not _is_dense(result):
        result.copy_(_in_place(x.clone(), spec, axis))
    elif x.stride() != result.stride():
        _in_place(result.copy_(x), spec, axis)
    else:
        _dense(x, result, spec, axis)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)  # autograd did not see what was written
    return target


def _supported(x: Tensor, spec: QuantSpec) -> bool:
    # Of tapered elements, the kernel knows HiFloat8's alone.
    row = spec.format
    mx = row.is_mx and not row.element.complement
    known = "nearest-away" if row.element.name == "hif8" else mx and "nearest-even"
    return (
        spec.rounding == known
        and not spec.tensor_scale
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and _plain(x)
    )


def _plain(x: Tensor) -> bool:
    """Whether the memory of `x` can be read and written: not when traced, nor in a subclass."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and not torch.compiler.is_compiling()
    )


def _in_place(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """Quantize a tensor without gaps, and return it."""
    _dense(x, x, spec, axis)
    return x


def _dense(x: Tensor, out: Tensor, spec: QuantSpec, axis: int) -> None:
    """Quantize `x` into `out`, both of the same strides and without gaps."""
    if spec.block is None:
        _hif8(x, out, spec.overflow)
        return
    order = _memory_order(x)
    sizes = [x.shape[i] for i in order]
    place = order.index(axis % x.dim())
    size, inner = sizes[place], prod(sizes[place + 1 :])
    if 1 < inner < _NARROW:
        rows = x.movedim(axis, -1).contiguous()
        _mx_rows(rows, rows, spec, size)
        out.copy_(rows.movedim(-1, axis))
    elif inner == 1:
        _mx_rows(x, out, spec, size)
    else:
        _mx_columns(x, out, spec, size, inner)


def _hif8(x: Tensor, out: Tensor, overflow: str) -> None:
    bits = 8 * x.itemsize
    limit = (_MAX_HIF8 if overflow == "saturate" else EXPONENT) >> (32 - bits)
    pointers = (x.data_ptr(), out.data_ptr())
    units = -(-x.numel() // _ROW)
    entries = (*pointers, _ROW, x.numel(), limit)
    launch(kernel("hif8", bits), units, _GRAIN // _ROW, *entries)


def _mx_rows(x: Tensor, out: Tensor, spec: QuantSpec, size: int) -> None:
    total = x.numel()
    if size == total or size % spec.block == 0:
        size = _ROW  # no block crosses from one such row to the next, wherever the real ones end
    units, grain = -(-total // size), -(-_GRAIN // size)
    entries = (x.data_ptr(), out.data_ptr(), size, total, 0, 0, *_constants(spec))
    launch(kernel("mx_rows", 8 * x.itemsize, spec.block), units, grain, *entries)


def _mx_columns(x: Tensor, out: Tensor, spec: QuantSpec, size: int, inner: int) -> None:
    total = x.numel()
    blocks, tiles = -(-size // spec.block), -(-inner // TILE)
    units = total // (size * inner) * blocks * tiles
    grain = -(-_GRAIN // (spec.block * min(TILE, inner)))
    entries = (x.data_ptr(), out.data_ptr(), size, inner, blocks, tiles, *_constants(spec))
    launch(kernel("mx_columns", 8 * x.itemsize, spec.block), units, grain, *entries)


@functools.cache
def _constants(spec: QuantSpec) -> tuple[int, ...]:
    """Return carry, emax, emin, top, lowest, steps: see steps.py."""
    element = spec.format.element
    bits, emin = element.mantissa_bits, element.emin
    top = element.emax * UNIT + _fraction(element)
    lowest = (4 + bits - emin) * UNIT  # from there on no quantum is less than 2^-124
    return (
        _carry(element, spec.scale_rule),
        element.emax * UNIT,
        emin * UNIT,
        top,
        lowest,
        (23 - bits) * UNIT,
    )


def _carry(element: Minifloat, scale_rule: str) -> int:
    """Return what carries into the exponent of amax where the rule takes the next scale."""
    return {
        "floor": 0,
        "rceil": UNIT - 1 - _fraction(element),
        "ceil": UNIT - 1,
        "even": UNIT >> (element.mantissa_bits + 1),
    }[scale_rule]


def _fraction(element: Minifloat) -> int:
    """Return the fraction field of the element's largest value, as a float32."""
    return int((element.max_value / 2.0**element.emax - 1.0) * UNIT)


def _memory_order(x: Tensor) -> list[int]:
    """Return the axes from the slowest to the fastest in memory."""
    return sorted(range(x.dim()), key=lambda i: x.stride(i), reverse=True)


def _is_dense(x: Tensor) -> bool:
    """Whether `x` fills its piece of memory, without gaps or anything twice."""
    return x.permute(_memory_order(x)).is_contiguous()
