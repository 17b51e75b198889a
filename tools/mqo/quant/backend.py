"""The one way to quantize a tensor, whichever implementation does it."""

import functools
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mqo.quant.formats import check_choice, check_seed
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import signed

ENVIRONMENT_VARIABLE = "MQO_QUANT_BACKEND"

# Each is a module of this package, with a function `qdq(x, spec, axis, out, seed, amax)` as in
# reference.py: it gets checked arguments and returns None for what it does not support.
MODULES = {"reference": "reference", "cpu": "cpu", "triton": "gpu"}
_BY_DEVICE = {"cpu": "cpu", "cuda": "triton"}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

F = TypeVar("F")
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
        raise ValueError(f"out is {describe(out)}; valid: {describe(x)}, as x")
    if not is_traced(x):
        return _quantize(x, spec, axis, out, seed, amax)
    arguments = (amax, axis, signed(seed or 0), *fields_of(spec))
    if out is None:
        quantized: Tensor = torch.ops.megatron_quant.fake_quantize(x, *arguments)
        return quantized
    torch.ops.megatron_quant.fake_quantize_out(x, out, *arguments)
    return out


def check_arguments(x: Tensor, spec: QuantSpec, axis: int, seed: int | None) -> None:
    """Raise what `fake_quantize` raises for these arguments, unless they are valid."""
    if x.dtype not in DTYPES:
        raise TypeError(f"cannot quantize {x.dtype}; valid: {', '.join(map(str, DTYPES))}")
    if x.dim():
        check_choice("axis", axis, range(-x.dim(), x.dim()))
    elif spec.block:
        raise ValueError(f"{spec.quant_type} has blocks along an axis, and a 0-d tensor has none")
    if spec.rounding == "stochastic":
        check_seed(seed)


def _quantize(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    out: Tensor | None,
    seed: int | None,
    amax: Tensor | None,
) -> Tensor:
    """Ask one implementation after the other; arguments are checked."""
    for qdq in implementations(x.device.type, _load):
        result = qdq(x, spec, axis, out, seed, amax)
        if result is not None:
            return result
    raise AssertionError("the reference supports everything")


def implementations(device: str, load: Callable[[str], F | ImportError]) -> tuple[F, F]:
    """Return what to try, in order, for a tensor on `device`: of MODULES, as `load` finds them."""
    asked = os.environ.get(ENVIRONMENT_VARIABLE)
    if asked:
        check_choice(ENVIRONMENT_VARIABLE, asked, tuple(MODULES))
    chosen = load(asked or _BY_DEVICE.get(device, "reference"))
    reference = load("reference")
    if isinstance(reference, ImportError):
        raise reference
    if isinstance(chosen, ImportError):
        if asked:
            raise RuntimeError(
                f"{ENVIRONMENT_VARIABLE}={asked}, but that cannot be imported here: {chosen}"
            ) from chosen
        _warn_of_reference(str(chosen))
        chosen = reference
    return (chosen, reference)


@functools.cache
def _warn_of_reference(why: str) -> None:
    """Warn once that the kernels are missing. The reference gives the same bits, but is slower."""
    warnings.warn(
        f"mqo.quant computes with its reference, in torch operations: {why}. The CPU kernels need "
        "numba, those for GPUs need triton",
        stacklevel=2,
    )


@functools.cache
def _load(name: str) -> Qdq | ImportError:
    try:
        qdq: Qdq = import_module(f".{MODULES[name]}", __package__).qdq
    except ImportError as error:
        return error
    return qdq


def describe(x: Tensor) -> str:
    """Return what an error says of a tensor."""
    return f"{list(x.shape)} {x.dtype} on {x.device}"


# -- operators -------------------------------------------------------------------------------------

# torch.compile and fake tensors see one operator in the place of what an implementation does. It
# takes no objects: a spec goes in as its fields, and a seed as a signed number. It is defined one
# level below torch.library.custom_op, whose checks of every call cost more than a small tensor.
SPEC_SCHEMA = (
    "str quant_type, int? block, str scale_rule, str rounding, str overflow, bool tensor_scale,"
    " str tile"
)
_SHARED = f"Tensor? amax, int axis, int seed, {SPEC_SCHEMA}"
_NAME = "megatron_quant::fake_quantize"
torch.library.define(_NAME, f"(Tensor x, {_SHARED}) -> Tensor")
torch.library.define(f"{_NAME}_out", f"(Tensor x, Tensor(a!) out, {_SHARED}) -> ()")

spec_of = functools.cache(QuantSpec)


def is_traced(x: Tensor) -> bool:
    """Return whether the operator has to be called, which takes some microseconds."""
    traced = torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor)
    return traced or is_in_torch_dispatch_mode()


def fields_of(spec: QuantSpec) -> tuple[Any, ...]:
    """Return what an operator takes in the place of a spec; `spec_of` makes one of it."""
    choices = (spec.block, spec.scale_rule, spec.rounding, spec.overflow, spec.tensor_scale)
    return (spec.quant_type, *choices, spec.tile)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _fake_quantize(x: Tensor, amax: Tensor | None, axis: int, seed: int, *fields: Any) -> Tensor:
    return _quantize(x, spec_of(*fields), axis, None, seed % 2**64, amax)


@torch.library.impl(f"{_NAME}_out", "CompositeExplicitAutograd")
def _fake_quantize_out(
    x: Tensor, out: Tensor, amax: Tensor | None, axis: int, seed: int, *fields: Any
) -> None:
    _quantize(x, spec_of(*fields), axis, out, seed % 2**64, amax)


torch.library.register_fake(_NAME, lambda x, *_: torch.empty_like(x))
torch.library.register_fake(f"{_NAME}_out", lambda *_: None)
