"""Sum the products of a GEMM block by block in float32, or as a tensor core does.

DeepSeek-V3 (arXiv 2412.19437) reports that Hopper's FP8 instructions align the products of a chunk
to the largest exponent among them, and keep 14 bits of each. MMA-Sim (arXiv 2511.10909) and Khattak
and Mikaitis (arXiv 2512.07004) give the details, also for other instructions: in each step a chunk
of products and the accumulator are aligned and added; the exponent of a product is the sum of its
operands' exponents; bits below the last one kept are truncated; the sum is truncated to the width
of the accumulator. The exponent of a subnormal element is that of its leading bit here; hardware
uses the exponent of the smallest normal number. benchmarks/accumulation.py uses this module;
benchmarks/results/accumulation-2026-11-27.md compares this model with published results of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from mqo.quant.scales import exponent, power_of_two
from torch import Tensor

# Takes a [M, K] and b [N, K], and returns their product [M, N].
Multiply = Callable[[Tensor, Tensor], Tensor]
# Used for zeros; it is below the exponent of any product of float32 values.
_LEAST_EXPONENT = -400


@dataclass(frozen=True)
class TensorCore:
    """The widths of a tensor core's accumulation.

    addend_bits: bits kept of the addend with the largest exponent; an addend whose exponent is
        lower by n keeps n fewer.
    accumulator_bits: significant bits of the accumulator after each chunk.
    chunk: number of products that are aligned and added at once.
    """

    addend_bits: int
    accumulator_bits: int
    chunk: int = 32


# Addends and accumulator have 13 bits after the leading one.
HOPPER_FP8 = TensorCore(addend_bits=14, accumulator_bits=14)
# Addends have 25 bits after the leading one; the accumulator is float32.
BLACKWELL_FP8 = TensorCore(addend_bits=26, accumulator_bits=24)
BF16 = TensorCore(addend_bits=26, accumulator_bits=24, chunk=16)  # on Hopper and on Blackwell


def tensor_core(a: Tensor, b: Tensor, core: TensorCore, start: Tensor | float = 0.0) -> Tensor:
    """Multiply a [M, K] by b [N, K] transposed as `core` would, plus start: float64 [M, N].

    All tensors are float64; a and b have at most 24 significant bits, so products are exact.
    `start` is the initial value of the accumulator. Memory grows with M * N * chunk.
    """
    total = a.new_zeros(a.shape[0], b.shape[0]) + start
    for left, right in zip(a.split(core.chunk, dim=1), b.split(core.chunk, dim=1), strict=True):
        products = left[:, None] * right[None]
        exponents = exponent(left).short()[:, None] + exponent(right).short()[None]
        largest = torch.maximum(exponents.amax(dim=-1), exponent(total).short())
        shift = power_of_two(core.addend_bits - 1 - largest.long().clamp(min=_LEAST_EXPONENT))
        cut = products.mul_(shift[..., None]).trunc_().sum(dim=-1)
        total = _cut((cut + (total * shift).trunc()) / shift, core.accumulator_bits)
    return total


def _cut(x: Tensor, bits: int) -> Tensor:
    """Truncate float64 to `bits` significant bits."""
    shift = power_of_two(bits - 1 - exponent(x).clamp(min=_LEAST_EXPONENT))
    return (x * shift).trunc() / shift


def in_blocks(
    a: Tensor,
    b: Tensor,
    block: int,
    multiply: Multiply,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return a [M, K] times b [N, K] transposed, summed in float32 over blocks: float32 [M, N].

    `multiply` computes the sum of one block. `scales` are the block scales of a and of b,
    [M, K / block] and [N, K / block]; they multiply the block sums, in float32.
    """
    total = torch.zeros(a.shape[0], b.shape[0])
    blocks = zip(a.split(block, dim=1), b.split(block, dim=1), strict=True)
    for i, (left, right) in enumerate(blocks):
        part = multiply(left, right).float()
        if scales is not None:
            part *= scales[0][:, i, None].float() * scales[1][:, i].float()
        total += part
    return total
