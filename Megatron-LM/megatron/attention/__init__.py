"""Attention without the s x s scores, for the layers and quant types that can do without them."""

from .choice import FusedAttentionError, fused_context, obstacle, runs_fused
from .fused import fused_attention
from .masks import is_causal

__all__ = [
    "FusedAttentionError",
    "fused_attention",
    "fused_context",
    "is_causal",
    "obstacle",
    "runs_fused",
]
