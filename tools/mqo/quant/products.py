"""The products of quantized operands, multiplied by alpha before they are rounded.

With a scale per tensor, an operand is alpha times values that bfloat16 represents exactly: an
element of the format times the scale of its block. A GEMM of hardware multiplies these values, sums
in float32, multiplies by the alphas of both operands, and rounds once. Operands that include alpha
would be rounded once more, before the product. docs/emulation.md has the measurements.

`GemmOperands.product` takes a function that patched Megatron calls, and returns the one of
`_PRODUCTS` that computes the same with alphas. Every function has one alpha per operand; it is 1
for an operand without a scale per tensor.

An operand of a custom quantizer may be a sum of terms. In linear layers they are joined along the
axis that the product sums over, and `_sum` adds the products of all pairs of terms before it
rounds. Other products get the sum itself.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass
class Alphas:
    """The factors of a product: those of its left and of its right operand.

    `lhs_rest` and `rhs_rest` are those of the terms of a sum after the first.
    """

    lhs: float = 1.0
    rhs: float = 1.0
    lhs_rest: tuple[float, ...] = ()
    rhs_rest: tuple[float, ...] = ()

    @property
    def both(self) -> float:
        """The factor of the product of operands that are one term each."""
        return self.lhs * self.rhs

    @property
    def is_sum(self) -> bool:
        """Whether an operand has several terms."""
        return bool(self.lhs_rest or self.rhs_rest)


def joins_terms(function: Callable[..., Any]) -> bool:
    """Return whether `with_alphas` supports operands of several terms for a function."""
    return _PRODUCTS.get(_name(function)) in (_matmul, _accumulate, _overwrite)


def is_known(function: Callable[..., Any]) -> bool:
    """Return whether `with_alphas` supports a function."""
    return _name(function) in _PRODUCTS


def with_alphas(function: Callable[..., Any], alphas: Alphas) -> Callable[..., Any]:
    """Return `function`, which computes a product, with the product multiplied by `alphas`.

    They may change until the returned function is called.
    """

    def multiply(*args: Any, **kwargs: Any) -> Any:
        if alphas == Alphas():
            return function(*args, **kwargs)
        return _PRODUCTS[_name(function)](alphas, *args, **kwargs)

    return multiply


def matmul(left: Tensor, right: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """Return alpha * left @ right, [..., n], for left [..., k] and right [k, n]."""
    if left.device.type == "cpu":
        return _on_cpu(torch.matmul, left, right, alpha, out)
    rows = left.reshape(-1, left.shape[-1])
    product = torch.addmm(_unused(left), rows, right, beta=0, alpha=alpha, out=out)
    return product.view(*left.shape[:-1], right.shape[-1])


def bmm(left: Tensor, right: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """Return alpha * left @ right for batches of matrices."""
    if alpha == 1.0:
        return torch.bmm(left, right, out=out)
    if left.device.type == "cpu":
        return _on_cpu(torch.bmm, left, right, alpha, out)
    return torch.baddbmm(_unused(left), left, right, beta=0, alpha=alpha, out=out)


def _on_cpu(
    multiply: Callable[..., Tensor], left: Tensor, right: Tensor, alpha: float, out: Tensor | None
) -> Tensor:
    """Multiply in float32, and then by alpha: some CPU kernels would multiply an operand by it."""
    if left.dtype == torch.float32:
        return multiply(left, right, out=out).mul_(alpha)
    product = multiply(left.float(), right.float()).mul_(alpha)
    return product.to(left.dtype) if out is None else out.copy_(product)


def _unused(operand: Tensor) -> Tensor:
    """Return a term for a sum with the factor 0, which torch does not read."""
    return operand.new_empty(())


# -- linear layers ---------------------------------------------------------------------------------


def _matmul(alphas: Alphas, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute fprop, dgrad, and wgrad without fused accumulation."""
    if alphas.is_sum:
        product = _sum(alphas, left.flatten(0, -2), right)
        product = product.view(*left.shape[:-1], right.shape[-1])
        return product.to(left.dtype) if out is None else out.copy_(product)
    return matmul(left, right, alphas.both, out)


def _accumulate(alphas: Alphas, x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Add wgrad to the main gradient, in two steps: the fused kernels of apex have no alpha."""
    if alphas.is_sum:
        main_grad.add_(_sum(alphas, grad.t(), x))
    else:
        main_grad.add_(_wide(grad.t(), x), alpha=alphas.both)


def _overwrite(alphas: Alphas, x: Tensor, grad: Tensor, /, *, out: Tensor, **_: Any) -> None:
    """Write wgrad to the main gradient, in place of Transformer Engine's GEMM without alpha."""
    out.copy_(_sum(alphas, grad.t(), x))


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32."""
    if left.device.type == "cpu":  # out_dtype is for GPUs
        return left.float() @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)


def _sum(alphas: Alphas, left: Tensor, right: Tensor) -> Tensor:
    """Return the product of sums, whose terms are joined along the middle axis, float32 [m, n]."""
    left_alphas, right_alphas = (alphas.lhs, *alphas.lhs_rest), (alphas.rhs, *alphas.rhs_rest)
    lefts, rights = left.chunk(len(left_alphas), -1), right.chunk(len(right_alphas), 0)
    products = [
        _wide(lefts[i], rights[j]).mul_(left_alphas[i] * right_alphas[j])
        for i, j in itertools.product(range(len(lefts)), range(len(rights)))
    ]
    return functools.reduce(Tensor.add_, products)


# -- attention -------------------------------------------------------------------------------------


def _baddbmm(
    alphas: Alphas, buffer: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float
) -> Tensor:
    """Compute QK; `alpha` is the softmax scale, and `beta` 0, so that `buffer` is not read."""
    assert beta == 0
    return _batched(left, right, alpha, alphas)


def _bmm(alphas: Alphas, left: Tensor, right: Tensor) -> Tensor:
    """Compute PV."""
    return _batched(left, right, 1.0, alphas)


def scores(
    left: Tensor, right: Tensor, scale: float, alpha: float, out: Tensor | None = None
) -> Tensor:
    """Return scale * alpha * left @ right for batches of queries and keys."""
    if alpha == 1.0:  # upstream's operation
        return torch.baddbmm(_unused(left), left, right, beta=0, alpha=scale, out=out)
    return bmm(left, right, scale * alpha, out)


def _batched(left: Tensor, right: Tensor, scale: float, alphas: Alphas) -> Tensor:
    function: Any = _Batched
    product: Tensor = function.apply(left, right, scale, alphas)
    return product


class _Batched(torch.autograd.Function):
    """The product of operands whose gradients are those of operands that include alpha."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, scale: float, alphas: Alphas) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.scale, ctx.alphas = scale, alphas
        return scores(left, right, scale, alphas.both)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        left, right = ctx.saved_tensors
        of_left = bmm(grad, right.transpose(1, 2), ctx.alphas.rhs)
        of_right = bmm(left.transpose(1, 2), grad, ctx.alphas.lhs)
        if ctx.scale != 1.0:  # after rounding, as in torch's own backward pass
            of_left, of_right = of_left.mul_(ctx.scale), of_right.mul_(ctx.scale)
        return of_left, of_right, None, None


def fold(operand: Tensor, alpha: float) -> tuple[Tensor, float]:
    """Return `operand` times a power of two, and the rest of alpha, which is 1 or 0.5 .. 1.

    The rest is for the softmax scale of a fused kernel. The gradient of the result is divided by
    it, so that it becomes that of an operand that includes alpha.
    """
    if alpha == 1.0:
        return operand, alpha
    rest, exponent = math.frexp(alpha)
    function: Any = _Folded
    return function.apply(operand, 2.0**exponent, rest), rest


class _Folded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operand: Tensor, power: float, rest: float) -> Tensor:
        ctx.rest = rest
        return operand * power

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad / ctx.rest, None, None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "")


_PRODUCTS: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "wgrad_gemm_accum_fp32": _accumulate,
    "wgrad_gemm_accum_fp16": _accumulate,
    "te_general_gemm": _overwrite,
    "baddbmm": _baddbmm,
    "bmm": _bmm,
}
