"""Multi-latent attention from the local implementation's modules.

Its keys and values have heads of different sizes, neither of them `kv_channels`, and its core
attention is told both. Without them nothing changes.
"""

from mqo.overlay.edits import AddParameters, Anchor, FileEdits, PrependBody, ReplaceExpression

RESOLVER = "QKNormConfigResolver"
INIT = "DotProductAttention.__init__"

FILES = (
    FileEdits(
        "megatron/core/transformer/dot_product_attention.py",
        (
            AddParameters(INIT, "k_channels: int | None = None, v_channels: int | None = None"),
            # The heads of the output, and thereby hidden_size_per_partition, are the values'.
            ReplaceExpression(
                INIT,
                Anchor("self.config.kv_channels"),
                "(v_channels or self.config.kv_channels)",
            ),
            # The scores sum over a key's head; MLA itself passes a scale that holds yarn's, too.
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
            # This release takes Transformer Engine to be there: its classes may be mocks.
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
            # Without query latents there is nothing to norm. The local spec names a norm for them
            # all the same, which earlier releases pass over; and this one puts a projection with
            # a norm inside instead of the spec's, where no other release, and no published
            # model, has a norm.
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
