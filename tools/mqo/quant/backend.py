"""Dispatch `fake_quantize` to the CPU, GPU or reference implementation."""

import functools
import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    is_in_torch_dispatch_mode,
    is_traceable_wrapper_subclass,
)

from mqo.quant.formats import REFERENCE_TYPES, check_choice, check_seed, tensor_types
from mqo.quant.plugin_calls import call
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import signed
from mqo.quant.straight_through import straight_through

ENVIRONMENT_VARIABLE = "MQO_QUANT_BACKEND"

# Each is a module of this package, with a function `qdq(x, spec, axis, out, seed, amax)` as in
# reference.py: it gets checked arguments and returns None for what it does not support.
MODULES = {"reference": "reference", "cpu": "cpu", "triton": "gpu"}
_BY_DEVICE = {"cpu": "cpu", "cuda": "triton"}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# torch.compile can trace a lookup, but not the construction of a spec.
_DEFAULTS = {name: QuantSpec(name) for name in REFERENCE_TYPES}

F = TypeVar("F")
Qdq = Callable[[Tensor, QuantSpec, int, Tensor | None, int | None, Tensor | None], Tensor | None]


def fake_quantize(
    x: Tensor,
    spec: QuantSpec | str,
    *,
    axis: int = -1,
    out: Tensor | None = None,
    seed: int | None = None,
    amax: Tensor | None = None,
    has_gradient: bool = True,
) -> Tensor:
    """Round `x` to the format of `spec` and back: a tensor of x's shape and dtype.

    MQO_QUANT_BACKEND names the implementation: reference, cpu or triton. If unset, it is the one
    for x's device, if that can be imported. The reference handles what another does not support;
    all give the same bits.

    Args:
        x: float32, bfloat16 or float16, of any shape, strides and device.
        spec: the format, or its name; 'none' returns `x` itself, of any dtype.
        axis: the axis along which blocks run, the contraction axis of a GEMM.
        out: the tensor to write and return, of x's shape and dtype and any strides, or `x` itself.
            It must not overlap `x` otherwise. None makes a new tensor, with x's strides.
        seed: for stochastic rounding, 0 .. 2^64 - 1; see stochastic.py.
        amax: float32 [] on x's device, the amax of the tensor that `x` is a part of, for formats
            with a scale per tensor; None for that of `x`.
        has_gradient: whether the result has the gradient of `x` (straight-through), if `x` requires
            one and `out` is None.

    x's dtype represents the result exactly, unless rounding up exceeds its largest value and gives
    Inf (docs/formats.md). With torch.set_flush_denormal(True) the CPU reads subnormals as zeros.

    Raises:
        TypeError: `x` has another dtype, or is a DTensor or another wrapper of tensors.
        ValueError: an argument is invalid; the text names the valid ones.
        RuntimeError: the implementation that MQO_QUANT_BACKEND names cannot be imported.

    Examples:
        >>> x = torch.tensor([0.1, 0.7, -2.4, 5.2])
        >>> fake_quantize(x, "mxfp4")
        tensor([ 0.0000,  0.5000, -2.0000,  6.0000])
        >>> fake_quantize(x, QuantSpec("mxint8", rounding="stochastic"), seed=1).shape
        torch.Size([4])
    """
    if not isinstance(spec, QuantSpec):
        check_choice("quant type", spec, tensor_types())
        spec = _DEFAULTS.get(spec) or QuantSpec(spec)
    if spec.quant_type == "none" and out is None:
        return x
    if has_gradient and x.requires_grad and out is None and torch.is_grad_enabled():
        return straight_through(x, partial(_rounded, spec, axis, None, seed, amax))
    with torch.no_grad():
        return _rounded(spec, axis, out, seed, amax, x)


def _rounded(
    spec: QuantSpec,
    axis: int,
    out: Tensor | None,
    seed: int | None,
    amax: Tensor | None,
    x: Tensor,
) -> Tensor:
    if spec.quant_type == "none":
        assert out is not None
        return out.copy_(x)
    check_arguments(x, spec, axis, seed)
    if out is not None and (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(f"out is {tensor_text(out)}; valid: {tensor_text(x)}, as x")
    if spec.plugin:
        values = call(x, spec, axis, seed, amax).value().to(x.dtype)
        return values if out is None else out.copy_(values)
    if not is_traced(x):
        return _quantize(x, spec, axis, out, seed, amax)
    arguments = (amax, axis, signed(seed or 0), *fields_of(spec))
    if out is None:
        quantized: Tensor = torch.ops.megatron_quant.fake_quantize(x, *arguments)
        return quantized
    torch.ops.megatron_quant.fake_quantize_out(x, out, *arguments)
    return out


def check_arguments(x: Tensor, spec: QuantSpec, axis: int, seed: int | None) -> None:
    """Check the arguments of `fake_quantize`; raise what it raises."""
    if is_traceable_wrapper_subclass(x) and not is_fake(x):
        raise TypeError(
            f"cannot quantize a {type(x).__name__}; valid: torch.Tensor, such as the local part. "
            "Quantized layers work with DDP and FSDP, but not with tensor parallelism by DTensor"
        )
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
    """Use the first implementation that supports the arguments, which are checked."""
    for qdq in implementations(x.device.type, _load):
        result = qdq(x, spec, axis, out, seed, amax)
        if result is not None:
            return result
    raise AssertionError("the reference supports everything")


def implementations(device: str, load: Callable[[str], F | ImportError]) -> tuple[F, F]:
    """Return the implementations to try, in order, for a tensor on `device`; `load` loads one."""
    requested = os.environ.get(ENVIRONMENT_VARIABLE)
    if requested:
        check_choice(ENVIRONMENT_VARIABLE, requested, tuple(MODULES))
    chosen = load(requested or _BY_DEVICE.get(device, "reference"))
    reference = load("reference")
    if isinstance(reference, ImportError):
        raise reference
    if isinstance(chosen, ImportError):
        if requested:
            raise RuntimeError(
                f"{ENVIRONMENT_VARIABLE}={requested}, but that cannot be imported: {chosen}"
            ) from chosen
        _warn_of_reference(str(chosen))
        chosen = reference
    return (chosen, reference)


@functools.cache
def _warn_of_reference(why: str) -> None:
    """Warn once that the kernels are missing. The reference gives the same bits, but is slower."""
    warnings.warn(
        f"mqo.quant uses its slow reference, in torch operations: {why}. Install numba for the CPU "
        "kernels, or triton for those of GPUs",
        stacklevel=2,
    )


@functools.cache
def _load(name: str) -> Qdq | ImportError:
    try:
        qdq: Qdq = import_module(f".{MODULES[name]}", __package__).qdq
    except ImportError as error:
        return error
    return qdq


def tensor_text(x: Tensor) -> str:
    """Describe a tensor in an error: its shape, dtype and device."""
    return f"{list(x.shape)} {x.dtype} on {x.device}"


# -- operators -------------------------------------------------------------------------------------

# torch.compile and fake tensors see an operator instead of an implementation. It does not take
# objects: a spec is passed as its fields, and a seed as a signed number. It is defined one level
# below torch.library.custom_op, whose checks of every call cost more than a small tensor.
SPEC_SCHEMA = (
    "str quant_type, int? block, str scale_rule, str rounding, str overflow, bool tensor_scale,"
    " str tile, bool without_alpha"
)
_SHARED = f"Tensor? amax, int axis, int seed, {SPEC_SCHEMA}"
_NAME = "megatron_quant::fake_quantize"
torch.library.define(_NAME, f"(Tensor x, {_SHARED}) -> Tensor")
torch.library.define(f"{_NAME}_out", f"(Tensor x, Tensor(a!) out, {_SHARED}) -> ()")

spec_from_fields = functools.cache(QuantSpec)


def is_traced(x: Tensor) -> bool:
    """Return whether to call the operator, which costs some microseconds."""
    return torch.compiler.is_compiling() or is_fake(x) or is_in_torch_dispatch_mode()


def is_fake(x: Tensor) -> bool:
    """Return whether `x` has no values."""
    return x.is_meta or isinstance(x, FakeTensor)


def fields_of(spec: QuantSpec) -> tuple[Any, ...]:
    """Return the fields of a spec for an operator; `spec_from_fields` is the inverse."""
    choices = (spec.block, spec.scale_rule, spec.rounding, spec.overflow, spec.tensor_scale)
    return (spec.quant_type, *choices, spec.tile, spec.without_alpha)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _fake_quantize(x: Tensor, amax: Tensor | None, axis: int, seed: int, *fields: Any) -> Tensor:
    return _quantize(x, spec_from_fields(*fields), axis, None, seed % 2**64, amax)


@torch.library.impl(f"{_NAME}_out", "CompositeExplicitAutograd")
def _fake_quantize_out(
    x: Tensor, out: Tensor, amax: Tensor | None, axis: int, seed: int, *fields: Any
) -> None:
    _quantize(x, spec_from_fields(*fields), axis, out, seed % 2**64, amax)


torch.library.register_fake(_NAME, lambda x, *_: torch.empty_like(x))
torch.library.register_fake(f"{_NAME}_out", lambda *_: None)
