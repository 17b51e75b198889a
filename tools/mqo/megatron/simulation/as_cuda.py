"""Make the program take the same paths on a CPU as with CUDA, if memory or work differ."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mqo.megatron.simulation.watch import Watch


def import_megatron(watch: Watch) -> None:
    """Import megatron.core, and count each function that torch.compile fuses as one kernel."""
    import mqo.megatron.run.start
    from mqo.megatron import device

    torch.compile = functools.partial(_compiled, watch)
    with patch.object(device.accelerator, "is_available", lambda: True, create=True):
        import_module("megatron.core.jit")  # chooses torch.compile if a GPU is available
    mqo.megatron.run.start.compile_late = lambda: None
    # Not the substitutes for gloo, which lacks collectives of parts with different sizes.
    device.all_gather = torch.distributed.all_gather  # type: ignore[assignment]
    device.reduce_scatter = torch.distributed.reduce_scatter  # type: ignore[assignment]
    torch.nn.functional.rms_norm = functools.partial(_rms_norm, watch)


def chunk_sizes() -> None:
    """Make losses and attention use the chunk sizes of a GPU."""
    from mqo.megatron.attention import chunks as attention
    from mqo.megatron.losses import chunks as losses

    losses.CHUNK_ELEMENTS.clear()
    attention.BUDGET["cpu"] = attention.BUDGET["cuda"]


def adam(optimizer: Any) -> None:
    """Make torch's Adam update all weights of a group at once, which is the default on CUDA."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in inner.optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = True


def _compiled(watch: Watch, function: Callable | None = None, **options: Any) -> Callable:
    if function is None:
        return functools.partial(_compiled, watch, **options)

    @functools.wraps(function)
    def region(*args: Any, **kwargs: Any) -> Any:
        with watch.hidden():
            result = function(*args, **kwargs)
        watch.tell(None, (function.__name__, *args), kwargs, result)
        return result

    return region


def _rms_norm(
    watch: Watch,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    epsilon = torch.finfo(input.dtype).eps if eps is None else eps
    return _RmsNorm.apply(watch, input, weight, epsilon)


class _RmsNorm(torch.autograd.Function):
    """Model CUDA's kernels: the forward pass saves its input and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, watch: Watch, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        with watch.hidden():
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            result = (wide * scale).to(x.dtype) * weight
        watch.tell(None, ("rms_norm", x, weight), {}, (result, scale))
        ctx.watch = watch
        ctx.save_for_backward(x, weight, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight, scale = ctx.saved_tensors
        with ctx.watch.hidden():
            normal = x.float() * scale
            wide = grad.float() * weight.float()
            inner = (wide * normal).mean(-1, keepdim=True)
            of_x = ((wide - normal * inner) * scale).to(x.dtype)
            of_weight = (grad.float() * normal).flatten(0, -2).sum(0).to(weight.dtype)
            del normal, wide, inner
        ctx.watch.tell(None, ("rms_norm backward", grad, x, weight), {}, (of_x, of_weight))
        return None, of_x, of_weight, None
