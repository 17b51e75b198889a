"""The straight-through estimator: a rounded tensor has the gradient of the tensor itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def straight_through(tensor: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    """Return quantize(tensor), whose gradient with respect to `tensor` is the identity."""
    function: Any = _StraightThrough
    rounded: Tensor = function.apply(tensor, quantize)
    return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        return quantize(tensor)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
