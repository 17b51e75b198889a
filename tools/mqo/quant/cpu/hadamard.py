"""The random Hadamard transform for the CPU: the reference's bits for finite values.

Unlike the reference it keeps subnormals under torch.set_flush_denormal(True), too.
"""

import functools
from array import array
from math import prod

import torch
from torch import Tensor

from mqo.quant.cpu.compile import kernel
from mqo.quant.cpu.hadamard_kernels import PEAK, hadamard_columns, hadamard_rows
from mqo.quant.cpu.hadamard_steps import LINE, span_of
from mqo.quant.cpu.memory import GRAIN, NARROW, ROW, is_plain
from mqo.quant.cpu.steps import TILE
from mqo.quant.cpu.threads import launch
from mqo.quant.hadamard import factor_of, signs_of
from mqo.quant.spec import Hadamard
from mqo.quant.strides import is_dense, memory_order

# Columns of larger results are written past the caches. A cache would read each line before it is
# overwritten, and has few places for rows that are a power of two apart: twice the time.
STREAM_BYTES = 1 << 23


def transform(
    x: Tensor,
    out: Tensor,
    hadamard: Hadamard,
    axis: int,
    seed: int | None,
    amax: Tensor | None,
) -> bool:
    """Write what `hadamard.transform` returns to `out`, and its largest magnitude to `amax`.

    That function checks the arguments. False for tensors that are not plain ones in this machine's
    memory: nothing is written.
    """
    if not all(is_plain(tensor) for tensor in (x, out, amax) if tensor is not None):
        return False
    result = out.detach()
    x = _laid_out(x.detach(), axis)
    order = memory_order(x)
    target = result
    if result.dtype != x.dtype or not result.permute(order).is_contiguous():
        target = torch.empty([out.shape[i] for i in order], dtype=x.dtype)
        target = target.permute([order.index(i) for i in range(x.dim())])
    pattern = _dense(x, target, hadamard, axis, factor_of(hadamard), seed)
    if target is not result:
        result.copy_(target)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # autograd did not see what was written
    if amax is not None:
        largest = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
        amax.copy_(largest.to(out.dtype))  # float16 is rounded behind the kernel
    return True


def _laid_out(x: Tensor, axis: int) -> Tensor:
    """Return `x` in a dtype and in memory that the kernels take."""
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
    """Transform `x` into `out`, both without gaps and with axes in the same order of memory.

    Return the pattern of the result's largest magnitude.
    """
    order = memory_order(x)
    bits, points, size, padded = 8 * x.itemsize, hadamard.points, x.shape[axis], out.shape[axis]
    inner = prod(x.shape[i] for i in order[order.index(axis % x.dim()) + 1 :])
    if inner == 1:
        if size == padded:
            size = padded = ROW  # no block crosses from one such row to the next
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
    """Return what elements are XORed with: those of a row's span, or a word for each of a column's.

    A column's word changes the signs of all elements in a word of a row.
    """
    negative = (signs_of(hadamard, seed) < 0).tolist()
    if across:
        word = 0x80000000 if bits == 32 else 0x80008000
        return array("I", [word * each for each in negative])
    repeats = span_of(hadamard.points, bits) // hadamard.points
    return array("I" if bits == 32 else "H", [each << (bits - 1) for each in negative] * repeats)
