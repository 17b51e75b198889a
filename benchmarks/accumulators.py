"""Ways to sum the products of a GEMM: in float32 by blocks, and as a tensor core does, simulated.

DeepSeek-V3 (arXiv 2412.19437) reports that Hopper's FP8 instructions align the products of a chunk
to the largest exponent among them, and keep 14 bits of each. MMA-Sim (arXiv 2511.10909) and Khattak
and Mikaitis (arXiv 2512.07004) give the details, for other instructions, too: a chunk is some
products and the accumulator; a product's exponent is the sum of its operands'; what lies below the
last bit kept is cut off, toward zero; the sum is cut to the accumulator's bits, toward zero, too.
An element that is subnormal in its format counts with its own exponent here, on hardware with that
of the smallest normal number. The results of 2026-11-23 compare the model with those of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from mqo.quant.scales import exponent, power_of_two
from torch import Tensor

# Takes a [M, K] and b [N, K], and returns their product [M, N].
Multiply = Callable[[Tensor, Tensor], Tensor]
# Below the exponent of any product of float32 values; zeros have none of their own.
_LEAST_EXPONENT = -400


@dataclass(frozen=True)
class TensorCore:
    """How a chunk of products is added to an accumulator.

    bits: how many bits are kept of an addend that has the largest exponent; one whose exponent is
        lower by n has n fewer.
    kept: significant bits of the accumulator after each chunk.
    chunk: products that are aligned and added at once.
    """

    bits: int
    kept: int
    chunk: int = 32


# 13 bits behind the leading one, of addends and of the accumulator.
HOPPER_FP8 = TensorCore(bits=14, kept=14)
# 25 bits behind the leading one, and an accumulator of float32.
BLACKWELL_FP8 = TensorCore(bits=26, kept=24)
BF16 = TensorCore(bits=26, kept=24, chunk=16)  # of both


def tensor_core(a: Tensor, b: Tensor, core: TensorCore, start: Tensor | float = 0.0) -> Tensor:
    """Return what `core` makes of a [M, K] times b [N, K] transposed, plus start: float64 [M, N].

    All are float64, a and b of at most 24 significant bits, so that products are exact. `start` is
    what the accumulator holds before. Memory grows with M * N * chunk.
    """
    total = a.new_zeros(a.shape[0], b.shape[0]) + start
    for left, right in zip(a.split(core.chunk, dim=1), b.split(core.chunk, dim=1), strict=True):
        products = left[:, None] * right[None]
        exponents = exponent(left).short()[:, None] + exponent(right).short()[None]
        largest = torch.maximum(exponents.amax(dim=-1), exponent(total).short())
        shift = power_of_two(core.bits - 1 - largest.long().clamp(min=_LEAST_EXPONENT))
        cut = products.mul_(shift[..., None]).trunc_().sum(dim=-1)
        total = _cut((cut + (total * shift).trunc()) / shift, core.kept)
    return total


def _cut(x: Tensor, bits: int) -> Tensor:
    """Cut float64 to `bits` significant bits, toward zero."""
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

    `multiply` sums a block. `scales` are those of the blocks of a and of b,
    [M, K / block] and [N, K / block]: they multiply the blocks' sums, in float32.
    """
    total = torch.zeros(a.shape[0], b.shape[0])
    blocks = zip(a.split(block, dim=1), b.split(block, dim=1), strict=True)
    for i, (left, right) in enumerate(blocks):
        part = multiply(left, right).float()
        if scales is not None:
            part *= scales[0][:, i, None].float() * scales[1][:, i].float()
        total += part
    return total
