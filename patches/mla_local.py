"""Allow multi-latent attention with the local implementation's modules.

Its keys and values have different head sizes, neither of them `kv_channels`, so the core attention
gets both as parameters. Without them nothing changes.
"""

from mqo.overlay.edits import AddParameters, Anchor, FileEdits, PrependBody, ReplaceExpression

RESOLVER = "QKNormConfigResolver"
INIT = "DotProductAttention.__init__"

FILES = (
    FileEdits(
        "megatron/core/transformer/dot_product_attention.py",
        (
            AddParameters(INIT, "k_channels: int | None = None, v_channels: int | None = None"),
            # The output has the values' head size, so hidden_size_per_partition does, too.
            ReplaceExpression(
                INIT,
                Anchor("self.config.kv_channels"),
                "(v_channels or self.config.kv_channels)",
            ),
            # Scores sum over the key's head size. MLA passes a scale that includes yarn's.
            ReplaceExpression(
                INIT,
                Anchor("math.sqrt(self.hidden_size_per_attention_head)"),
                "math.sqrt(k_channels or self.hidden_size_per_attention_head)",
            ),
        ),
    ),
    FileEdits(
        "megatron/core/transformer/multi_latent_attention.py",
        (
            # This release assumes Transformer Engine, whose classes may be mocks.
            ReplaceExpression(
                "MultiLatentAttention.__init__",
                Anchor("isinstance(self.linear_proj, TELinear)"),
                "isinstance(TELinear, type) and isinstance(self.linear_proj, TELinear)",
            ),
        ),
        versions=">=0.16,<0.17",
    ),
    FileEdits(
        "megatron/core/transformer/mla_qk_norm_config.py",
        (
            # Without query latents there is nothing to normalize. The local spec still names a
            # norm, which earlier releases ignore. This release replaces the projection by one
            # that contains a norm, as no other release and no published model does.
            PrependBody(
                f"{RESOLVER}._raise_unused_q_norm",
                "if self.fused_norm_linear_impl is None:\n    return\n",
            ),
            PrependBody(
                f"{RESOLVER}._mla_fused_linear_or_default",
                "if module_name == 'linear_q_proj':\n    return module_spec or self.linear_impl\n",
            ),
        ),
        versions=">=0.19",
    ),
)
