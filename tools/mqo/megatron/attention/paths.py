"""The paths without stored s x s scores, for upstream's DotProductAttention."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mqo.megatron.attention.backward import BackwardOperands, Heads
from mqo.megatron.attention.chunked import Scores, Settings, chunked_attention
from mqo.megatron.attention.chunks import Visible
from mqo.megatron.attention.context import SequencePart
from mqo.megatron.attention.fused import fused_attention
from mqo.megatron.attention.packed import spans_of
from mqo.quant.config import current
from mqo.quant.gemms import GemmOperands, gemm_operands
from mqo.quant.products import fold


class FusedAttentionError(RuntimeError):
    """This attention cannot use the selected path."""


def fused_context(
    layer: Any,
    pv_type: str,
    starts: tuple[int, ...],
    qk: GemmOperands,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rng_tracker: Any,
) -> Tensor:
    """Return the context [sq, b, np * hv] of `layer`, packed [t, np * hv], by a fused kernel.

    Args:
        layer: the DotProductAttention.
        pv_type: quant type of the product of probabilities and values in its source.
        starts: the first token of each document, for packed sequences; else empty.
        qk: quantizes query and key.
        query: [sq, b, np, hn]. Under context parallelism this rank's two chunks.
        key: [sk, b, ng, hn], for the whole sequence.
        value: [sk, b, ng, hv], for the whole sequence. Packed, all three lack b.
        rng_tracker: upstream's, the source of dropout's random numbers, as in the unfused path.
    """
    packed = query.dim() == 3
    query, key, value = _with_batch(query, key, value)
    alphas = qk.separate_alphas()
    query, key = qk.lhs(query), qk.rhs(key)
    (query, left), (key, right) = fold(query, alphas.lhs), fold(key, alphas.rhs)
    value = gemm_operands("pv", pv_type, layer).rhs(value)
    dropout = dropout_of(layer)
    fused = partial(fused_attention, scale=layer.softmax_scale * left * right, dropout=dropout)
    own = dropout and not layer.config.sequence_parallel
    contexts = []
    with rng_tracker.fork() if own else nullcontext():
        for span in spans_of(query.size(0), key.size(0), part_of(layer), starts):
            seen = slice(span.first, span.position + span.stop - span.start)
            rows = query[span.start : span.stop]
            # The single query of a decoding step sees every key.
            contexts.append(fused(rows, key[seen], value[seen], causal=rows.size(0) > 1))
    return _as(packed, contexts[0] if len(contexts) == 1 else torch.cat(contexts))


def chunked_context(
    layer: Any,
    pv_type: str,
    starts: tuple[int, ...],
    mask: Tensor | None,
    qk: GemmOperands,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rng_tracker: Any,
    backward: BackwardOperands | None = None,
) -> Tensor:
    """Return the context as `fused_context` does, with quantized probabilities and any `mask`.

    `backward` are the quantizers of the backward pass. No random number is drawn: chunks do not
    support dropout.
    """
    del rng_tracker
    packed, sizes = query.dim() == 3, (query.size(0), key.size(0))
    heads = Heads(*_with_batch(query, key, value))
    pv, softmax = gemm_operands("pv", pv_type, layer), layer.scale_mask_softmax
    _, batch, count, width = heads.query.shape
    normalized = not current().unnormalized_probs
    wide = (softmax.input_in_float16 and softmax.softmax_in_fp32) or not normalized
    dtype = torch.float32 if wide else None
    alphas = qk.separate_alphas(), pv.separate_alphas()
    # The amax is 1: the first query of a causal mask sees one key, with probability 1, and
    # unnormalized probabilities have a 1 in each row.
    parts = pv.lhs_parts((batch * count, *sizes), 1.0, query.device)
    scores = Scores(layer.softmax_scale, softmax.scale, dtype, normalized, qk.turn(width))
    rounded = Heads(qk.lhs(heads.query), qk.rhs(heads.key), pv.rhs(heads.value))
    visible = Visible(tuple(spans_of(*sizes, part_of(layer), starts)))
    visible = visible if mask is None else Visible.by(mask, *sizes)
    backward = backward or BackwardOperands.untyped()
    settings = Settings(scores, visible, parts, *alphas, backward)
    return _as(packed, chunked_attention(rounded, heads, settings))


def part_of(layer: Any) -> SequencePart:
    """Return (index, number) of the part of the sequence with the layer's queries."""
    return getattr(layer, "mqo_part", (0, 1))


def dropout_of(layer: Any) -> float:
    """Return the current dropout rate of the layer: 0 in evaluation."""
    return layer.attention_dropout.p if layer.attention_dropout.training else 0.0


def _as(packed: bool, context: Tensor) -> Tensor:
    """Return a context in the layout of the operands: without a batch if packed."""
    return context.squeeze(1) if packed else context


def _with_batch(*tensors: Tensor) -> list[Tensor]:
    """Add a batch of one to packed tensors [t, heads, d]."""
    return [t.unsqueeze(1) if t.dim() == 3 else t for t in tensors]
