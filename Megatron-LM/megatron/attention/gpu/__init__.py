"""Attention whose probabilities are quantized in registers, as Triton kernels.

It differs from FlashAttention in two ways. Forward passes over the keys twice, for what is
quantized is the probabilities, which are known after the row's sum is. Backward computes the
probabilities again: quantized ones for the gradient of the values, and unrounded ones for the
softmax.

No tensor has s x s elements. No gradient is added up atomically: results are reproducible. Under
TRITON_INTERPRET=1, set before triton is imported, the kernels run on CPU tensors, too.
"""

from typing import Any

import torch
from megatron.quant import OperandParts, config
from megatron.quant.formats import NONE
from megatron.quant.gpu import INTERPRETED
from megatron.quant.gpu.steps import OF_THE_TENSOR, steps_of
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..chunked import Scores
from .launch import Work, stages_of, tile_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256


def kernel_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scores: Scores, probs: OperandParts
) -> Tensor:
    """Compute causal attention of grouped queries in Megatron's layout, differentiable once.

    Scores, probabilities and their gradients are rounded where `chunked_attention` rounds them.

    Args:
        query: [s, b, np, hn], as its GEMM shall see it.
        key: [s, b, ng, hn], also so; np is a multiple of ng.
        value: [s, b, ng, hv], also so; hv may differ from hn.
        scores: their scale, and how the softmax takes them.
        probs: quantizes the probabilities, [b * np, s, s]; gradients pass straight through.

    Returns:
        [s, b, np * hv].

    Raises:
        ValueError: `supports` says why.
    """
    if why := supports(query, key, value, scores, probs):
        raise ValueError(f"no kernel for this attention: {why}")
    return _Kernel.apply(query, key, value, scores, probs)


def supports(query: Tensor, key: Tensor, value: Tensor, scores: Scores, probs: OperandParts) -> str:
    """Return why `kernel_attention` cannot take these arguments, "" if it can."""
    return (
        _obstacle_of_operands(query, key, value)
        or _obstacle_of_scores(query.dtype, scores)
        or _obstacle_of_probs(probs)
        or _obstacle_of_memory(query, value, probs)
    )


def _obstacle_of_operands(query: Tensor, key: Tensor, value: Tensor) -> str:
    if not (query.is_cuda or INTERPRETED):
        return f"the device is {query.device.type}"
    if query.dtype not in _DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return f"the dtypes are {query.dtype}, {key.dtype} and {value.dtype}"
    length, batch, heads, width = query.shape
    if key.shape[:2] != (length, batch) or value.shape[:3] != key.shape[:3]:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        return f"the shapes are {shapes}"
    if width != key.size(-1) or heads % key.size(2):
        return f"{heads} heads of {width} do not share {key.size(2)} of {key.size(-1)}"
    if max(width, value.size(-1)) > _WIDEST:
        return f"a head dim is over {_WIDEST}: {width} and {value.size(-1)}"
    return ""


def _obstacle_of_scores(dtype: torch.dtype, scores: Scores) -> str:
    if scores.dtype not in (None, dtype, torch.float32):
        return f"the softmax is in {scores.dtype}"
    if not scores.normalized:
        return "what is quantized is not normalized"
    if scores.factor is not None and (scores.dtype or dtype) != torch.float32:
        return "a softmax in half precision scales its scores"
    return ""


def _obstacle_of_probs(probs: OperandParts) -> str:
    spec = probs.spec
    if spec.quant_type == NONE:
        return ""
    if spec.tile == "square":
        return "probabilities are quantized in squares"
    if steps_of(spec).scale in OF_THE_TENSOR and probs.amax is None:
        return f"{spec.quant_type} scales by the amax of all probabilities, which is not known"
    if probs.is_watched:
        return "probabilities are measured or kept in this step"
    if config.current().check_nan:
        return "check_nan looks at the probabilities"
    return ""


def _obstacle_of_memory(query: Tensor, value: Tensor, probs: OperandParts) -> str:
    tile, size = tile_of(query, value, probs), query.element_size()
    if stages_of(tile, size, query.device):
        return ""
    return f"{tile.keys} keys of {tile.width} and {tile.value_width} take too much shared memory"


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: Scores, probs: OperandParts
    ) -> Tensor:
        probs.count()
        work = Work.of(query, key, value, scores, probs)
        out, statistics = work.forward()
        ctx.save_for_backward(query, key, value, *statistics)
        ctx.scores, ctx.probs = scores, probs
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *statistics = ctx.saved_tensors
        work = Work.of(query, key, value, ctx.scores, ctx.probs)
        return (*work.backward(grad.unflatten(2, (query.size(2), -1)), *statistics), None, None)
