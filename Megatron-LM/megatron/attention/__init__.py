"""Attention without the s x s scores, for the layers and quant types that can do without them."""

from .choice import FusedAttentionError, without_scores
from .chunked import Scores, chunked_attention
from .chunks import Span, Visible
from .context import chunk_mask, gather_context
from .fused import fused_attention
from .masks import is_causal

__all__ = [
    "FusedAttentionError",
    "Scores",
    "Span",
    "Visible",
    "chunk_mask",
    "chunked_attention",
    "fused_attention",
    "gather_context",
    "is_causal",
    "without_scores",
]
