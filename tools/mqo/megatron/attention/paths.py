"""The ways to attend without the s x s scores, for upstream's DotProductAttention."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mqo.megatron.attention.chunked import Scores, chunked_attention
from mqo.megatron.attention.chunks import Visible
from mqo.megatron.attention.context import Part
from mqo.megatron.attention.fused import fused_attention
from mqo.megatron.attention.packed import spans_of
from mqo.quant.config import current
from mqo.quant.gemms import GemmOperands, gemm_operands


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
    """Return the context [sq, b, np * hv] of `layer`, packed [t, np * hv]: fused, with dropout.

    Args:
        layer: the DotProductAttention.
        pv_type: what its source says of the product of probabilities and values.
        starts: where documents begin, of packed sequences; none of others.
        qk: quantizes query and key.
        query: [sq, b, np, hn]. Under context parallelism this rank's two chunks.
        key: [sk, b, ng, hn]: of the whole sequence.
        value: [sk, b, ng, hv], so, too. Packed, all three are without b.
        rng_tracker: upstream's, whose numbers dropout takes, as in the unfused path.
    """
    packed = query.dim() == 3
    query, key, value = _with_batch(query, key, value)
    query, key = qk.lhs(query), qk.rhs(key)
    value = gemm_operands("pv", pv_type, layer).rhs(value)
    dropout = dropout_of(layer)
    fused = partial(fused_attention, scale=layer.softmax_scale, dropout=dropout)
    own = dropout and not layer.config.sequence_parallel
    found = []
    with rng_tracker.fork() if own else nullcontext():
        for span in spans_of(query.size(0), key.size(0), part_of(layer), starts):
            seen = slice(span.first, span.position + span.stop - span.start)
            rows = query[span.start : span.stop]
            # A single query, of a decoding step, sees every key.
            found.append(fused(rows, key[seen], value[seen], causal=rows.size(0) > 1))
    return _as(packed, found[0] if len(found) == 1 else torch.cat(found))


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
) -> Tensor:
    """Return what `fused_context` does, of quantized probabilities and a `mask` that is not causal.

    No random number is drawn: what drops out has no chunks.
    """
    del rng_tracker
    packed, sizes = query.dim() == 3, (query.size(0), key.size(0))
    operands, how = _quantized(layer, pv_type, qk, *_with_batch(query, key, value))
    visible = Visible(tuple(spans_of(*sizes, part_of(layer), starts)))
    visible = visible if mask is None else Visible.by(mask, *sizes)
    return _as(packed, chunked_attention(*operands, visible=visible, **how))


def _quantized(
    layer: Any, pv_type: str, qk: GemmOperands, query: Tensor, key: Tensor, value: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return the quantized operands, and how their scores become probabilities."""
    pv = gemm_operands("pv", pv_type, layer)
    softmax, (queries, batch, heads, _) = layer.scale_mask_softmax, query.shape
    normalized = not current().unnormalized_probs
    wide = (softmax.input_in_float16 and softmax.softmax_in_fp32) or not normalized
    dtype = torch.float32 if wide else None
    # The first query of a causal mask sees one key, with all of its weight; what is not normalized
    # has a 1 in each row.
    whole = torch.ones((), dtype=torch.float32, device=query.device)
    parts = pv.lhs_parts((batch * heads, queries, key.size(0)), amax=whole)
    scores = Scores(layer.softmax_scale, softmax.scale, dtype, normalized)
    return (qk.lhs(query), qk.rhs(key), pv.rhs(value)), {"scores": scores, "probs": parts}


def part_of(layer: Any) -> Part:
    """Return which of how many parts of the sequence the layer's queries are."""
    return getattr(layer, "mqo_part", (0, 1))


def dropout_of(layer: Any) -> float:
    """Return the share that the layer drops out now: none in evaluation."""
    return layer.attention_dropout.p if layer.attention_dropout.training else 0.0


def _as(packed: bool, context: Tensor) -> Tensor:
    """Return a context as the caller gave its operands: packed, without a batch."""
    return context.squeeze(1) if packed else context


def _with_batch(*tensors: Tensor) -> list[Tensor]:
    """Give packed ones [t, heads, d] a batch of one."""
    return [t.unsqueeze(1) if t.dim() == 3 else t for t in tensors]
