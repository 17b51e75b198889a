"""Attention without the s x s scores, for the layers and quant types that can do without them."""
