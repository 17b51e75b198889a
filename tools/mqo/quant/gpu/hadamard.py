"""The random Hadamard transform as a Triton kernel: the reference's bits for finite values.

A program computes all butterflies of a tile: the two halves of a reshaped tile are split, added and
subtracted, and joined. The factor multiplies only after all sums, because a compiler may fuse a
product and a sum into one fma, which rounds once.
"""

# ruff: noqa: N803  names of compile-time values are in capitals, as is usual with Triton
import functools
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from mqo.quant.gpu import INTERPRETED
from mqo.quant.gpu.arithmetic import loaded, stored
from mqo.quant.gpu.tiles import dealt, in_order, offset, plan_tiles, positions
from mqo.quant.hadamard import factor_of, signs_of
from mqo.quant.spec import Hadamard
from mqo.quant.stochastic import signed
from mqo.quant.tensor_amax import largest


@triton.jit
def _with_signs(values, low, high) -> tl.tensor:
    """Flip signs in blocks, [blocks, points], where the element's bit of (low, high) is set."""
    i = tl.arange(0, values.shape[1])
    word = tl.where(i < 64, low.to(tl.int64), high.to(tl.int64))
    negative = ((word >> (i & 63)) & 1).to(tl.int32)
    return (values.to(tl.int32, bitcast=True) ^ (negative << 31)[None, :]).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _butterflies(values, STRIDE: tl.constexpr) -> tl.tensor:
    """Replace pairs of elements in blocks, [blocks, points], by their sum and difference."""
    shape: tl.constexpr = [values.shape[0], values.shape[1] // (2 * STRIDE), 2, STRIDE]
    low, high = tl.split(tl.trans(tl.reshape(values, shape), 0, 1, 3, 2))
    joined = tl.join(low + high, low - high)
    return tl.reshape(tl.trans(joined, 0, 1, 3, 2), values.shape)


@triton.jit(do_not_specialize=["low", "high"])
def _kernel(
    x,
    out,
    low,
    high,
    factor,
    sizes,
    x_strides,
    out_strides,
    TILE: tl.constexpr,
    POINTS: tl.constexpr,
) -> None:
    """Transform a tile of a tensor whose rows have `sizes.size` elements."""
    row, position = positions(sizes, TILE)
    inside = (row < sizes.rows) & (position < sizes.size)
    values = loaded(tl.load(x + offset(row, position, sizes, x_strides), mask=inside, other=0))
    values = tl.reshape(in_order(values, TILE), [TILE.rows * TILE.columns // POINTS, POINTS])
    values = _with_signs(values, low, high)
    for i in tl.static_range(7):
        if 1 << i < POINTS:
            values = _butterflies(values, 1 << i)
    values = dealt(tl.reshape(values * factor, [TILE.rows, TILE.columns]), TILE)
    inside = (row < sizes.rows) & (position < tl.cdiv(sizes.size, POINTS) * POINTS)
    target = out + offset(row, position, sizes, out_strides)
    tl.store(target, stored(values, out.dtype.element_ty, False), mask=inside)


def transform(
    x: Tensor,
    out: Tensor,
    hadamard: Hadamard,
    axis: int,
    seed: int | None,
    amax: Tensor | None,
) -> bool:
    """Write the result of `hadamard.transform` to `out`, and its amax to `amax`.

    Return whether it did: False for a tensor that is not on a CUDA device (except in Triton's
    interpreter) or has too many dimensions. The caller has checked the arguments.
    """
    if not (x.is_cuda or INTERPRETED):
        return False
    if not _launch(x, out, hadamard, axis, seed):
        # The dimensions of a dense tensor can be merged into few enough.
        dense, result = x.contiguous(), out.new_empty(out.shape)
        if not _launch(dense, result, hadamard, axis, seed):
            return False
        out.copy_(result)
    if amax is not None:
        amax.copy_(largest(out))
    return True


def _launch(x: Tensor, out: Tensor, hadamard: Hadamard, axis: int, seed: int | None) -> bool:
    """Write the transform of `x` to `out`; return False if it has too many dimensions."""
    plan = plan_tiles(x.shape, x.stride(), out.stride(), axis, hadamard.points, 1)
    if plan is None:
        return False
    seen = torch.int16 if x.dtype == torch.bfloat16 else x.dtype
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _kernel[(plan.programs,)](
            x.view(seen),
            out.view(seen),
            *_words(hadamard, seed),
            factor_of(hadamard).item(),
            plan.sizes,
            plan.x,
            plan.out,
            TILE=plan.tile,
            POINTS=hadamard.points,
            num_warps=plan.warps,
        )
    return True


@functools.lru_cache(maxsize=64)  # both operands of a GEMM have the same seed
def _words(hadamard: Hadamard, seed: int | None) -> tuple[int, int]:
    """Return two int64 with a bit for each element of a block, set if its sign is negative."""
    bits = sum(1 << i for i, sign in enumerate(signs_of(hadamard, seed).tolist()) if sign < 0)
    return signed(bits % 2**64), signed(bits >> 64)
