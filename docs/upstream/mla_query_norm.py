"""Multi-latent attention without query latents gets an unwanted norm of its queries.

The choice of norms takes the projection of the queries for the one after the latents.
Without Transformer Engine, stubs replace it, since the bug is in the choice of classes. Exits with
1 if the projection of the queries has a norm, or if no class can be chosen.
"""

import sys

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

SIZES = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "kv_lora_rank": 8}
# The modules that get_gpt_layer_with_transformer_engine_spec and get_gpt_layer_local_spec name.
ENGINE, LOCAL = TESpecProvider(), LocalSpecProvider()
norm = LOCAL.layer_norm()
plain = ENGINE.column_parallel_linear(), LOCAL.column_parallel_linear()
named = {
    "transformer_engine": (plain[0], ENGINE.column_parallel_layer_norm_linear(), IdentityOp),
    "local": (plain[1], plain[1], norm),
}
wrong = False
for implementation, (query, up, norms) in named.items():
    config = MLATransformerConfig(**SIZES, q_lora_rank=None, qk_layernorm=True)
    config.transformer_impl = implementation
    modules = MLASelfAttentionSubmodules(
        linear_q_proj=query,
        linear_kv_up_proj=up,
        linear_proj=None,
        q_layernorm=norms,
        kv_layernorm=norms,
    )
    try:
        kept = QKNormConfigResolver(config, modules).resolve()["linear_q_proj"] is query
        result = "that of the specification" if kept else "another one, with a norm inside"
    except ValueError as error:
        kept, result = False, f"ValueError: {error}"
    print(f"{implementation}: projection of the queries: {result}")
    wrong |= not kept
sys.exit(wrong)
