"""Give upstream's Transformer Engine layers the attention that has quantization sites."""

from typing import Any


def with_local_attention(spec: Any) -> Any:
    """Set the core attention in a spec to upstream's DotProductAttention, and return the spec.

    `spec` is upstream's ModuleSpec of a layer, or its specs for the layers of a block.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return spec
