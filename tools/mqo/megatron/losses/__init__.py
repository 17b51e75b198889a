"""Losses over a large vocabulary, computed in chunks of tokens instead of in fp32 copies."""

from mqo.megatron.losses.cross_entropy import chunked_cross_entropy
from mqo.megatron.losses.kl import chunked_kl

__all__ = ["chunked_cross_entropy", "chunked_kl"]
