"""Attention that never stores the s x s scores, for supported layers and quant types."""
