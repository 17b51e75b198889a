"""The random Hadamard transform of a GEMM's operand: it spreads an outlier over its block.

Both operands of a GEMM have the same transform along the contraction axis. The transform is
orthogonal, so the product does not change, except for rounding.

Blocks of d points divide the axis; the last one is padded with zeros. A block becomes, in float32
and in this order:

    y[i] = sign[i] * x[i]
    for s in 1, 2, 4, ..., d/2, and each i without the bit s:
        (y[i], y[i+s]) = (y[i] + y[i+s], y[i] - y[i+s])
    y[i] = y[i] * float32(1 / sqrt(d))

and is then rounded to the dtype of x, as in Transformer Engine's reference. That is x times
diag(sign) times Sylvester's matrix over sqrt(d). `reference` computes exactly this; implementations
for a device, next to those of `fake_quantize`, give the same bits for finite values.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mqo.quant.backend import DTYPES, MODULES, implementations, is_traced, tensor_text
from mqo.quant.formats import check_choice, check_seed
from mqo.quant.spec import Hadamard
from mqo.quant.stochastic import RANDOM_BITS, draws, signed
from mqo.quant.strides import is_dense, memory_order, permute_back
from mqo.quant.tensor_amax import largest

# NVIDIA's for the wgrad of NVFP4: arXiv 2509.25149, and Transformer Engine.
_FIXED = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def signs_of(hadamard: Hadamard, seed: int | None = None) -> Tensor:
    """Return the signs of a block, 1 or -1: float32 [points]; random ones need `seed`."""
    if hadamard.signs == "none":
        return torch.ones(hadamard.points)
    if hadamard.signs == "fixed":
        return torch.tensor(_FIXED, dtype=torch.float32).repeat(hadamard.points // len(_FIXED))
    assert seed is not None  # `transform` refuses it
    negative = draws(torch.Size([hadamard.points]), seed) < 2 ** (RANDOM_BITS - 1)
    return torch.where(negative, -1.0, 1.0)


def factor_of(hadamard: Hadamard) -> Tensor:
    """Return the factor of the sums, 1 / sqrt(points): float32 []."""
    return torch.tensor(1.0 / sqrt(hadamard.points), dtype=torch.float32)


@torch.no_grad()
def transform(
    x: Tensor,
    hadamard: Hadamard,
    *,
    axis: int = -1,
    seed: int | None = None,
    out: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """Return the transform of `x` along `axis`, without gradient.

    It has the dtype and the shape of `x`, except that the axis is padded to a multiple of
    `hadamard.points`. MQO_QUANT_BACKEND names the implementation, as for `fake_quantize`.

    Args:
        x: float32, bfloat16 or float16, of any shape with an axis, strides and device.
        hadamard: the transform.
        axis: the contraction axis of a GEMM.
        seed: for random signs, 0 .. 2^64 - 1.
        out: the tensor to write and return, with the shape and dtype of the result, on x's device.
            It may be `x` itself if the shape is the same, and must not overlap it otherwise. None
            makes a new tensor, whose axes have the same order in memory as those of `x`.
        amax: float32 [] on x's device, to which the amax of the result is written, NaN if there is
            a NaN. It can be passed to `fake_quantize`, which then does not compute it.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: an argument is invalid; the text names the valid ones.
        RuntimeError: the implementation that MQO_QUANT_BACKEND names cannot be imported.
    """
    _check_arguments(x, hadamard, axis, seed)
    shape = _padded(x.shape, hadamard, axis)
    if out is None:
        out = _empty(x, shape)
    _check_target("out", out, shape, x.dtype, x.device)
    if amax is not None:
        _check_target("amax", amax, [], torch.float32, x.device)
    if is_traced(x):
        given = (hadamard.points, hadamard.signs, axis, signed(seed or 0))
        torch.ops.megatron_quant.hadamard(x, out, amax, *given)
    else:
        _transform(x, out, hadamard, axis, seed, amax)
    return out


@dataclass(frozen=True)
class SignedHadamard:
    """A transform with the seed of its signs, along an axis of `size` elements."""

    hadamard: Hadamard
    seed: int | None
    size: int

    def apply(
        self, x: Tensor, axis: int, out: Tensor | None = None, amax: Tensor | None = None
    ) -> Tensor:
        """Return the transform of `x`, or of a slice of it in whole blocks, as `transform`."""
        return transform(x, self.hadamard, axis=axis, seed=self.seed, out=out, amax=amax)

    @torch.no_grad()
    def undo(self, y: Tensor, axis: int, out: Tensor | None = None) -> Tensor:
        """Return the `x` of this size whose transform is `y`.

        It is exact except for the rounding of the sums to the dtype of `y`. `out` may be `y`, which
        is then overwritten.
        """
        x = transform(y, replace(self.hadamard, signs="none"), axis=axis, out=out).movedim(axis, -1)
        signs = signs_of(self.hadamard, self.seed).to(x)
        x.mul_(signs.repeat(x.shape[-1] // self.hadamard.points))
        return x[..., : self.size].movedim(-1, axis)

    def padded(self, shape: Iterable[int], axis: int) -> list[int]:
        """Return the shape of the transform of a tensor of this shape."""
        return _padded(shape, self.hadamard, axis)


def _padded(shape: Iterable[int], hadamard: Hadamard, axis: int) -> list[int]:
    padded = list(shape)
    padded[axis] += -padded[axis] % hadamard.points
    return padded


def _check_arguments(x: Tensor, hadamard: Hadamard, axis: int, seed: int | None) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"cannot transform {x.dtype}; valid: {', '.join(map(str, DTYPES))}")
    if not x.dim():
        raise ValueError("a Hadamard transform needs an axis, and a 0-d tensor has none")
    check_choice("axis", axis, range(-x.dim(), x.dim()))
    if hadamard.signs == "random":
        check_seed(seed)


def _check_target(
    name: str, target: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    if (list(target.shape), target.dtype, target.device) != (shape, dtype, device):
        raise ValueError(f"{name} is {tensor_text(target)}; valid: {shape} {dtype} on {device}")


def _empty(x: Tensor, shape: list[int]) -> Tensor:
    """Return a new tensor whose axes have the same order in memory as those of `x`."""
    order = memory_order(x) if is_dense(x) else range(x.dim())
    return permute_back(x.new_empty([shape[i] for i in order]), order)


# -- implementations -------------------------------------------------------------------------------

# Each is the function `transform` of a module hadamard.py in the folder of the quantizers for a
# device. It gets checked arguments, of which the last is `amax`, and writes to the second, `out`;
# it returns False if it does not support them.
Implementation = Callable[[Tensor, Tensor, Hadamard, int, int | None, Tensor | None], bool]


def reference(x: Tensor, hadamard: Hadamard, axis: int, seed: int | None) -> Tensor:
    """Return the transform, computed with torch operators, for any device and memory order."""
    points, size = hadamard.points, x.shape[axis]
    y: Tensor = pad(x.detach().movedim(axis, -1).float(), (0, -size % points)).unflatten(
        -1, (-1, points)
    )
    y = y * signs_of(hadamard, seed).to(y.device)
    stride = 1
    while stride < points:
        pairs = y.unflatten(-1, (-1, 2, stride))
        low, high = pairs.unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
        stride *= 2
    y = y * factor_of(hadamard).to(y.device)
    return y.flatten(-2).to(x.dtype).movedim(-1, axis)


def _by_reference(
    x: Tensor,
    out: Tensor,
    hadamard: Hadamard,
    axis: int,
    seed: int | None,
    amax: Tensor | None,
) -> bool:
    out.copy_(reference(x, hadamard, axis, seed))
    if amax is not None:
        amax.copy_(largest(out))
    return True


@functools.cache
def _load(name: str) -> Implementation | ImportError:
    if name == "reference":
        return _by_reference
    try:
        module = import_module(f".{MODULES[name]}.hadamard", __package__)
    except ImportError as error:
        return error
    implementation: Implementation = module.transform
    return implementation


def _transform(x: Tensor, *arguments: Any) -> None:
    """Use the first implementation that supports the arguments, which are checked."""
    amax = arguments[-1]
    if x.numel():
        any(write(x, *arguments) for write in implementations(x.device.type, _load))
    elif amax is not None:
        amax.zero_()


# -- an operator, for torch.compile and fake tensors; see backend.py -------------------------------

_NAME = "megatron_quant::hadamard"
torch.library.define(
    _NAME,
    "(Tensor x, Tensor(a!) out, Tensor(b!)? amax, int points, str signs, int axis, int seed) -> ()",
)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _hadamard(
    x: Tensor,
    out: Tensor,
    amax: Tensor | None,
    points: int,
    signs: str,
    axis: int,
    seed: int,
) -> None:
    _transform(x, out, Hadamard(points, signs), axis, seed % 2**64, amax)


torch.library.register_fake(_NAME, lambda *_: None)
