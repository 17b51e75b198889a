"""Add a branch to local attention before the s x s scores are allocated.

The branch comes after the QK literal, so that all paths read it, and before grouped keys are
repeated. The PV literal comes later; its value is read from the source once, at import. Upstream's
own path refuses packed sequences; here they reach the branch, which may accept them.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, InsertBefore, ReplaceExpression

IMPORTS = """
from mqo.megatron.attention.choice import without_scores
from mqo.quant import site_types

SITE_TYPES = site_types(__file__)
"""

BRANCH = """
attend = without_scores(self, SITE_TYPES, query, key, attention_mask, packed_seq_params)
if attend is not None:
    return attend(qk_operands, query, key, value, tensor_parallel.get_cuda_rng_tracker())
"""

GROUPS = "self.num_attention_heads_per_partition // self.num_query_groups_per_partition > 1"

FILES = (
    FileEdits(
        "megatron/core/transformer/dot_product_attention.py",
        (
            AddImport(IMPORTS.lstrip()),
            ReplaceExpression(
                "DotProductAttention.forward",
                Anchor("packed_seq_params is None"),
                "packed_seq_params is None or packed_seq_params.qkv_format == 'thd'",
            ),
            InsertBefore("DotProductAttention.forward", (Anchor(GROUPS),), BRANCH.lstrip()),
        ),
    ),
)
