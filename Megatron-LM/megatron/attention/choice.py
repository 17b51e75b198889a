"""Whether a DotProductAttention runs fused: what --attention-backend asks, and what it can.

Called by its patched `forward`, with the layer itself; reads the layer's attributes alone.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.quant import is_exempt
from megatron.quant.config import scheduled
from torch import Tensor

from .context import Part, chunk_starts
from .fused import fused_attention
from .masks import is_causal

# --attention-backend: flash and fused want a fused kernel, unfused and local upstream's own path;
# auto, and a release without the option, takes the fused one where it can.
DEMANDED = ("flash", "fused")
REFUSED = ("unfused", "local")


class FusedAttentionError(RuntimeError):
    """A fused kernel was asked for, and this attention cannot run on one."""


def runs_fused(
    layer: Any, types: Mapping[str, str], query: Tensor, key: Tensor, mask: Tensor | None
) -> bool:
    """Whether `layer` shall take the fused path for these tensors.

    Args:
        layer: a DotProductAttention.
        types: {site: quant type} as its source says; nothing is fused without 'pv' at 'none', or
            where a schedule has another type for it at this step.
        query: [sq, b, np, hn].
        key: [sk, b, ng, hn].
        mask: [..., sq, sk], True where hidden; None for a causal one.

    Raises:
        FusedAttentionError: the backend is flash or fused, and the layer cannot.
    """
    backend = getattr(layer.config, "attention_backend", "auto")
    backend = getattr(backend, "name", backend)
    if backend in REFUSED:
        return False
    why = obstacle(layer, types, query, key, mask)
    if why and backend in DEMANDED:
        name = getattr(layer, "mqo_layer", f"attention layer {layer.layer_number}")
        raise FusedAttentionError(
            f"{name} cannot run fused: {why}. Expected: what a fused kernel can do, as "
            f"--attention-backend {backend} asks. `--attention-backend auto` takes the unfused "
            "path where it must"
        )
    return not why


def obstacle(
    layer: Any, types: Mapping[str, str], query: Tensor, key: Tensor, mask: Tensor | None
) -> str:
    """Why `layer` cannot run fused on these tensors, "" if it can; arguments as `runs_fused`."""
    pv = scheduled("pv", types["pv"]) if "pv" in types else "no plain literal"
    softmax = layer.scale_mask_softmax
    queries, keys, device = query.size(0), key.size(0), query.device.type
    if pv != "none" and not is_exempt(layer):
        return f"its source or schedule says pv = {pv}, and only 'none' needs no probabilities"
    mask_type = getattr(layer.attn_mask_type, "name", None)
    if mask_type != "causal":
        return f"its mask type is {mask_type}, not causal"
    if getattr(softmax, "window_size", None) is not None:
        return "it has a sliding window"
    if getattr(layer, "softmax_offset", None) is not None:
        return "its softmax has an offset"
    if softmax.scale is not None:
        return "--apply-query-key-layer-scaling scales its scores twice"
    if device not in ("cpu", "cuda"):
        return f"the device {device} has no fused kernel"
    if device == "cpu" and _dropout(layer):
        return "no fused kernel of the CPU drops out"
    if 1 < queries * _part(layer)[1] != keys:
        return f"it has {queries} queries for {keys} keys"
    # Last, as it reads a tensor.
    if mask is not None and not is_causal(mask, queries, keys):
        return "its attention mask is not the plain causal one"
    return ""


def fused_context(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, rng_tracker: Any
) -> Tensor:
    """The context [sq, b, np * hv] of `layer`: fused, with its scale and its dropout.

    query [sq, b, np, hn], key [sk, b, ng, hn] and value [sk, b, ng, hv]; `rng_tracker` is
    upstream's, whose random numbers dropout takes, as in the unfused path. Under context
    parallelism the queries are this rank's two chunks, and the keys the whole sequence's.
    """
    dropout = _dropout(layer)
    own = dropout and not layer.config.sequence_parallel
    with rng_tracker.fork() if own else nullcontext():
        # A single query, of a decoding step, sees every key.
        causal, part = query.size(0) > 1, _part(layer)
        fused = partial(fused_attention, scale=layer.softmax_scale, causal=causal, dropout=dropout)
        if part[1] == 1:
            return fused(query, key, value)
        size = query.size(0) // 2
        ends = [start + size for start in chunk_starts(query.size(0), part)]
        chunks = zip(query.split(size), ends, strict=True)
        return torch.cat([fused(chunk, key[:end], value[:end]) for chunk, end in chunks])


def _part(layer: Any) -> Part:
    """Which of how many parts of the sequence the layer's queries are."""
    return getattr(layer, "mqo_part", (0, 1))


def _dropout(layer: Any) -> float:
    """The share that the layer drops out now: none in evaluation."""
    return layer.attention_dropout.p if layer.attention_dropout.training else 0.0
