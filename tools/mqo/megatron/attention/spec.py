"""Upstream's layers of Transformer Engine, with the attention whose products have sites."""

from typing import Any


def with_local_attention(spec: Any) -> Any:
    """Return a layer's or a block's spec, its core attention upstream's own DotProductAttention.

    `spec` is upstream's ModuleSpec of a layer, or its specs of a block's layers; it is changed.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return spec
