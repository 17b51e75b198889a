"""The straight-through estimator: a rounded tensor has the gradient of the tensor itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor]


def straight_through(tensor: Tensor, quantize: Change, undo: Change | None = None) -> Tensor:
    """Return quantize(tensor), whose gradient with respect to `tensor` is the identity.

    If `quantize` transforms the tensor before it rounds, the gradient is undo(gradient).
    """
    function: Any = _StraightThrough
    rounded: Tensor = function.apply(tensor, quantize, undo)
    return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantize: Change, undo: Change | None) -> Tensor:
        ctx.undo = undo
        return quantize(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.undo is None else ctx.undo(grad), None, None
