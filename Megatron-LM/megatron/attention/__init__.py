"""Attention without the s x s scores, for the layers and quant types that can do without them."""

from .choice import FusedAttentionError, fused_context, obstacle, runs_fused
from .context import chunk_mask, gather_context
from .fused import fused_attention
from .masks import is_causal
