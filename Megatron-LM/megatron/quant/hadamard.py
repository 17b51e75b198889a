"""The random Hadamard transform of a GEMM's operand: it spreads an outlier over its block.

Both operands of a GEMM are transformed alike along the contraction axis. The transform is
orthogonal, so the product stays what it was, but for rounding.

A block of d points of the axis, from 0 on and the last one filled up with zeros, becomes, in
float32 and in this order:

    y[i] = sign[i] * x[i]
    for s in 1, 2, 4, ..., d/2, and each i without the bit s:
        (y[i], y[i+s]) = (y[i] + y[i+s], y[i] - y[i+s])
    y[i] = y[i] * float32(gain / sqrt(d))

and is then rounded to the dtype of x, as Transformer Engine's reference has it. That is x times
diag(sign) times Sylvester's matrix over sqrt(d).
"""

from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad

from .spec import Hadamard
from .stochastic import RANDOM_BITS, draws

# NVIDIA's for the wgrad of NVFP4: arXiv 2509.25149, and Transformer Engine.
_FIXED = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def signs_of(hadamard: Hadamard, seed: int | None = None) -> Tensor:
    """Return the signs of a block, 1 or -1: float32 [points]; random ones need `seed`."""
    if hadamard.signs == "none":
        return torch.ones(hadamard.points)
    if hadamard.signs == "fixed":
        return torch.tensor(_FIXED, dtype=torch.float32).repeat(hadamard.points // len(_FIXED))
    negative = draws(torch.Size([hadamard.points]), seed) < 2 ** (RANDOM_BITS - 1)
    return 1.0 - 2.0 * negative


@torch.no_grad()
def transform(
    x: Tensor, hadamard: Hadamard, *, axis: int = -1, gain: float = 1.0, seed: int | None = None
) -> Tensor:
    """Return the transform of `x` along `axis`, times `gain`.

    It has the dtype of `x`, which is float32, bfloat16 or float16, and its shape, but that the axis
    is a multiple of `hadamard.points` long. `seed` is for random signs, 0 .. 2^64 - 1.
    """
    points, size = hadamard.points, x.shape[axis]
    y = pad(x.detach().movedim(axis, -1).float(), (0, -size % points)).unflatten(-1, (-1, points))
    y = y * signs_of(hadamard, seed).to(y.device)
    stride = 1
    while stride < points:
        pairs = y.unflatten(-1, (-1, 2, stride))
        low, high = pairs.unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
        stride *= 2
    y = y * torch.tensor(gain / sqrt(points), dtype=torch.float32, device=y.device)
    return y.flatten(-2).to(x.dtype).movedim(-1, axis)
