"""The random Hadamard transform for the CPU: the reference's bits for finite values.

Unlike the reference, it also keeps subnormals under torch.set_flush_denormal(True).
"""

import functools
from array import array
from math import prod

import torch
from torch import Tensor

from mqo.quant.cpu.compile import kernel
from mqo.quant.cpu.hadamard_kernels import PEAK, hadamard_columns, hadamard_rows
from mqo.quant.cpu.hadamard_steps import LINE, span_of
from mqo.quant.cpu.memory import GRAIN, NARROW, ROW, is_usable
from mqo.quant.cpu.steps import TILE
from mqo.quant.cpu.threads import launch
from mqo.quant.hadamard import factor_of, signs_of
from mqo.quant.spec import Hadamard
from mqo.quant.strides import is_dense, memory_order, permute_back

# Columns of larger results bypass the caches. A cache reads each line before it is overwritten, and
# has few slots for rows that are a power of two apart, which would double the time.
STREAM_BYTES = 1 << 23


def transform(
    x: Tensor,
    out: Tensor,
    hadamard: Hadamard,
    axis: int,
    seed: int | None,
    amax: Tensor | None,
) -> bool:
    """Write the result of `hadamard.transform` to `out`, and its amax to `amax`.

    That function checks the arguments. Return False, and write nothing, if the memory of a tensor
    is not usable.
    """
    if not all(is_usable(tensor) for tensor in (x, out, amax) if tensor is not None):
        return False
    result = out.detach()
    x = _laid_out(x.detach(), axis)
    order = memory_order(x)
    target = result
    if result.dtype != x.dtype or not result.permute(order).is_contiguous():
        target = torch.empty([out.shape[i] for i in order], dtype=x.dtype)
        target = permute_back(target, order)
    pattern = _dense(x, target, hadamard, axis, factor_of(hadamard), seed)
    if target is not result:
        result.copy_(target)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # autograd did not see the write
    if amax is not None:
        largest = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
        amax.copy_(largest.to(out.dtype))  # float16 is rounded after the kernel
    return True


def _laid_out(x: Tensor, axis: int) -> Tensor:
    """Return `x` in a dtype and a memory layout that the kernels support."""
    x = x.float() if x.dtype == torch.float16 else x
    x = x if is_dense(x) else x.contiguous()
    order = memory_order(x)
    after = order[order.index(axis % x.dim()) + 1 :]
    if 1 < prod(x.shape[i] for i in after) < NARROW:
        return x.movedim(axis, -1).contiguous().movedim(-1, axis)
    return x


def _dense(
    x: Tensor, out: Tensor, hadamard: Hadamard, axis: int, factor: Tensor, seed: int | None
) -> int:
    """Transform `x` into `out`, both dense and with the same memory order of axes.

    Return the pattern of the amax of the result.
    """
    order = memory_order(x)
    bits, points, size, padded = 8 * x.itemsize, hadamard.points, x.shape[axis], out.shape[axis]
    inner = prod(x.shape[i] for i in order[order.index(axis % x.dim()) + 1 :])
    if inner == 1:
        if size == padded:
            size = padded = ROW  # no block spans two rows of this size
        run = kernel(hadamard_rows, bits, points)
        units, grain = -(-x.numel() // size), -(-GRAIN // size)
    else:
        aligned = out.data_ptr() % LINE == inner * x.itemsize % LINE == 0
        run = kernel(hadamard_columns, bits, points, aligned and out.nbytes >= STREAM_BYTES)
        units = out.numel() // (points * inner) * -(-inner // TILE)
        grain = -(-GRAIN // (points * min(TILE, inner)))
    signs = _signs(hadamard, seed, bits, inner > 1)
    address, _ = signs.buffer_info()
    sizes, bits = (size, padded, inner, x.numel()), int(factor.view(torch.int32).item())
    entries = (x.data_ptr(), out.data_ptr(), *sizes, address, bits, 0)
    return launch(run, units, grain, *entries)[PEAK]


@functools.lru_cache(maxsize=64)  # both operands of a GEMM have the same seed
def _signs(hadamard: Hadamard, seed: int | None, bits: int, across: bool) -> array:
    """Return the sign bits: one per element of a row's span, or a word per element of a column.

    A column's word changes the signs of all elements in a word of a row.
    """
    negative = (signs_of(hadamard, seed) < 0).tolist()
    if across:
        word = 0x80000000 if bits == 32 else 0x80008000
        return array("I", [word * each for each in negative])
    repeats = span_of(hadamard.points, bits) // hadamard.points
    return array("I" if bits == 32 else "H", [each << (bits - 1) for each in negative] * repeats)
