"""Allow context parallelism in local attention, where upstream refuses it.

A rank gathers the keys and values of the whole sequence, in order, before they are quantized, so
the blocks of both sites equal those of one process. The fused branch comes before the mask and
needs none; the unfused path gets a mask over all keys.
"""

from mqo.overlay.edits import (
    AddImport,
    Anchor,
    FileEdits,
    InsertBefore,
    PrependBody,
    ReplaceExpression,
)

GATHER = """
if self.config.context_parallel_size > 1:
    context_group = parallel_state.get_context_parallel_group()
    self.mqo_part = context_group.rank(), context_group.size()
    key, value = gather_context(key, context_group), gather_context(value, context_group)
"""

MASK = """
if self.config.context_parallel_size > 1 and attention_mask is None:
    attention_mask = chunk_mask(query.size(0), self.mqo_part, query.device)
"""

GROUPS = "self.num_attention_heads_per_partition // self.num_query_groups_per_partition > 1"

FILES = (
    FileEdits(
        "megatron/core/transformer/dot_product_attention.py",
        (
            AddImport("from mqo.megatron.attention.context import chunk_mask, gather_context"),
            ReplaceExpression(
                "DotProductAttention.__init__",
                Anchor("self.config.context_parallel_size == 1"),
                "self.config.context_parallel_size >= 1",
            ),
            PrependBody("DotProductAttention.forward", GATHER.lstrip()),
            InsertBefore("DotProductAttention.forward", (Anchor(GROUPS),), MASK.lstrip()),
        ),
    ),
)
