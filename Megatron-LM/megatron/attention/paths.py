"""The two ways to attend without the s x s scores, for a DotProductAttention of upstream's."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.quant import GemmOperands, gemm_operands
from megatron.quant.config import current
from torch import Tensor

from .chunked import Scores, chunked_attention
from .chunks import Visible
from .context import Part
from .fused import fused_attention
from .packed import spans_of


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
    """The context [sq, b, np * hv] of `layer`: fused, with its scale and its dropout.

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
    return found[0] if len(found) == 1 else torch.cat(found)


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
    """As `fused_context`, with quantized probabilities; `mask` is one that is not causal, or None.

    No random number is drawn: what drops out has no chunks.
    """
    del rng_tracker
    pv = gemm_operands("pv", pv_type, layer)
    query, key, value = _with_batch(query, key, value)
    softmax, (queries, batch, heads, _), keys = layer.scale_mask_softmax, query.shape, key.size(0)
    normalized = not current().unnormalized_probs
    wide = (softmax.input_in_float16 and softmax.softmax_in_fp32) or not normalized
    visible = Visible(tuple(spans_of(queries, keys, part_of(layer), starts)))
    # The first query of a causal mask sees one key, with all of its weight; what is not normalized
    # has a 1 in each row.
    whole = torch.ones((), dtype=torch.float32, device=query.device)
    return chunked_attention(
        qk.lhs(query),
        qk.rhs(key),
        pv.rhs(value),
        scores=Scores(
            layer.softmax_scale,
            softmax.scale,
            torch.float32 if wide else None,
            normalized=normalized,
        ),
        visible=visible if mask is None else Visible.by(mask, queries, keys),
        probs=pv.lhs_parts((batch * heads, queries, keys), amax=whole),
    )


def part_of(layer: Any) -> Part:
    """Which of how many parts of the sequence the layer's queries are."""
    return getattr(layer, "mqo_part", (0, 1))


def dropout_of(layer: Any) -> float:
    """The share that the layer drops out now: none in evaluation."""
    return layer.attention_dropout.p if layer.attention_dropout.training else 0.0


def _with_batch(*tensors: Tensor) -> list[Tensor]:
    """Give packed ones [t, heads, d] a batch of one."""
    return [t.unsqueeze(1) if t.dim() == 3 else t for t in tensors]
