"""Measure how much of a weight gradient is quantization noise.

wgrad computes dweight = grad^T x. The noise is the difference between this product of the rounded
operands and that of the unrounded ones. Only ROWS rows of the product are computed for it: all of
them would cost two more GEMMs per layer.
"""

from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16


class WatchedOperand(NamedTuple):
    """An operand of wgrad, [..., tokens, features], as it was and as it was rounded.

    A Hadamard transform is part of `rounded` if both operands have it: their product is free of it.
    """

    original: Tensor
    rounded: Tensor


class GradientSample(NamedTuple):
    """Some rows of a weight gradient, float32 [rows, K], and of the noise in them."""

    gradient: Tensor
    noise: Tensor

    def add(self, other: "GradientSample") -> "GradientSample":
        """Return the sample of the sum of two micro-batches' gradients."""
        return GradientSample(self.gradient + other.gradient, self.noise + other.noise)

    def energies(self) -> Tensor:
        """Return [sum gradient², sum noise²], float64, on the device."""
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in self]
        return torch.stack(norms).square()


@torch.no_grad()
def sample_gradient(grad: WatchedOperand, x: WatchedOperand) -> GradientSample:
    """Return every nth row of the product grad^T x, at most ROWS rows, and its noise."""
    stride = -(-grad.original.shape[-1] // ROWS)
    exact, rounded = (
        _rows(grad_values, stride).t() @ x_values.flatten(0, -2).float()
        for grad_values, x_values in zip(grad, x, strict=True)
    )
    return GradientSample(exact, rounded - exact)


def _rows(grad: Tensor, stride: int) -> Tensor:
    return grad.flatten(0, -2)[:, ::stride].float()
