"""The one way to quantize a tensor, whichever implementation does it."""

import functools
import os
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from .formats import check_choice, check_seed
from .spec import QuantSpec

ENVIRONMENT_VARIABLE = "MQO_QUANT_BACKEND"

# Each is a module beside this one, with a function `qdq(x, spec, axis, out, seed, amax)` as in
# reference.py: it gets checked arguments and returns None for what it does not support.
MODULES = {"reference": "reference", "cpu": "cpu", "triton": "gpu"}
_BY_DEVICE = {"cpu": "cpu", "cuda": "triton"}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Qdq = Callable[[Tensor, QuantSpec, int, Tensor | None, int | None, Tensor | None], Tensor | None]


@torch.no_grad()
def fake_quantize(
    x: Tensor,
    spec: QuantSpec,
    *,
    axis: int = -1,
    out: Tensor | None = None,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """Round `x` to the format of `spec` and back: x's shape and dtype, no gradient.

    MQO_QUANT_BACKEND names the implementation: reference, cpu or triton. Unset, it is the one
    made for x's device, where that can be imported. The reference does what another does not
    support; all give the same bits.

    Args:
        x: float32, bfloat16 or float16, of any shape, strides and device.
        spec: the format; 'none' returns `x` itself, of whatever dtype.
        axis: the axis along which blocks run, the contraction axis of a GEMM.
        out: where to write, and what to return: a tensor like `x`, of any strides, or `x` itself.
            It must not overlap `x` otherwise. None makes a new tensor, with x's strides.
        seed: for stochastic rounding, 0 .. 2^64 - 1; see stochastic.py.
        amax: float32 [] on x's device, the largest magnitude of the tensor that `x` is a part of,
            for formats with a scale of the tensor; None: of `x`.

    The result fits x's dtype exactly, except where rounding up passes its largest value and gives
    Inf (docs/formats.md). Under torch.set_flush_denormal(True) the CPU takes subnormals for zeros.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: an argument is none of the valid ones, which the text names.
        RuntimeError: the implementation that MQO_QUANT_BACKEND names cannot be imported.
    """
    if spec.quant_type == "none":
        return x if out is None else out.copy_(x)
    check_arguments(x, spec, axis, seed)
    if out is not None and (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(f"out is {_describe(out)}; valid: {_describe(x)}, as x")
    for qdq in _implementations(x.device.type):
        result = qdq(x, spec, axis, out, seed, amax)
        if result is not None:
            return result
    raise AssertionError("the reference supports everything")


def check_arguments(x: Tensor, spec: QuantSpec, axis: int, seed: int | None) -> None:
    """Raise what `fake_quantize` raises for these arguments, unless they are valid."""
    if x.dtype not in DTYPES:
        raise TypeError(f"cannot quantize {x.dtype}; valid: {', '.join(map(str, DTYPES))}")
    if x.dim() or spec.block:  # a scalar has no axis, and a format without blocks needs none
        check_choice("axis", axis, range(-x.dim(), x.dim()))
    if spec.rounding == "stochastic":
        check_seed(seed)


def _implementations(device: str) -> tuple[Qdq, ...]:
    """Return what to try, in order, for a tensor on `device`."""
    asked = os.environ.get(ENVIRONMENT_VARIABLE)
    if asked:
        check_choice(ENVIRONMENT_VARIABLE, asked, tuple(MODULES))
    chosen = _load(asked or _BY_DEVICE.get(device, "reference"))
    reference = _load("reference")
    if isinstance(chosen, ImportError):
        if asked:
            raise RuntimeError(
                f"{ENVIRONMENT_VARIABLE}={asked}, but that cannot be imported here: {chosen}"
            ) from chosen
        chosen = reference
    return (chosen, reference)


@functools.cache
def _load(name: str) -> Qdq | ImportError:
    try:
        return import_module(f".{MODULES[name]}", __package__).qdq
    except ImportError as error:
        return error


def _describe(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype} on {x.device}"
