"""The two ways to attend without the s x s scores, for a DotProductAttention of upstream's."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.quant import GemmOperands, gemm_operands
from megatron.quant.config import current
from torch import Tensor

from .chunked import Scores, chunked_attention
from .chunks import Span, Visible
from .context import Part, chunk_starts
from .fused import fused_attention


def fused_context(
    layer: Any,
    pv_type: str,
    qk: GemmOperands,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rng_tracker: Any,
) -> Tensor:
    """The context [sq, b, np * hv] of `layer`: fused, with its scale and its dropout.

    query [sq, b, np, hn], key [sk, b, ng, hn] and value [sk, b, ng, hv]; `qk` quantizes the first
    two, and `pv_type` is what the source says of the probabilities' product. `rng_tracker` is
    upstream's, whose random numbers dropout takes, as in the unfused path. Under context
    parallelism the queries are this rank's two chunks, and the keys the whole sequence's.
    """
    query, key = qk.lhs(query), qk.rhs(key)
    value = gemm_operands("pv", pv_type, layer).rhs(value)
    dropout = dropout_of(layer)
    own = dropout and not layer.config.sequence_parallel
    with rng_tracker.fork() if own else nullcontext():
        # A single query, of a decoding step, sees every key.
        causal, part = query.size(0) > 1, part_of(layer)
        fused = partial(fused_attention, scale=layer.softmax_scale, causal=causal, dropout=dropout)
        if part[1] == 1:
            return fused(query, key, value)
        size = query.size(0) // 2
        ends = [start + size for start in chunk_starts(query.size(0), part)]
        chunks = zip(query.split(size), ends, strict=True)
        return torch.cat([fused(chunk, key[:end], value[:end]) for chunk, end in chunks])


def chunked_context(
    layer: Any,
    pv_type: str,
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
    softmax, (queries, batch, heads, _) = layer.scale_mask_softmax, query.shape
    normalized = not current().unnormalized_probs
    wide = (softmax.input_in_float16 and softmax.softmax_in_fp32) or not normalized
    if mask is None:
        visible = Visible(tuple(_spans(queries, key.size(0), part_of(layer))))
    else:
        visible = Visible.by(mask, queries, key.size(0))
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
        visible=visible,
        probs=pv.lhs_parts((batch * heads, queries, key.size(0)), amax=whole),
    )


def part_of(layer: Any) -> Part:
    """Which of how many parts of the sequence the layer's queries are."""
    return getattr(layer, "mqo_part", (0, 1))


def dropout_of(layer: Any) -> float:
    """The share that the layer drops out now: none in evaluation."""
    return layer.attention_dropout.p if layer.attention_dropout.training else 0.0


def _spans(queries: int, keys: int, part: Part) -> Iterator[Span]:
    """Yield a rank's queries as the spans of the sequence that they are."""
    if part[1] == 1:
        yield Span(0, queries, keys - queries)
        return
    size = queries // 2
    for i, start in enumerate(chunk_starts(queries, part)):
        yield Span(i * size, (i + 1) * size, start)
