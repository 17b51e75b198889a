"""A branch in local attention, in front of everything that is made for the s x s scores.

It stands behind the QK literal, which so serves all paths, and before grouped keys are repeated.
The PV literal stands further down: what it says is read from the source, once, at import.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, InsertBefore

IMPORTS = """
from megatron.attention import without_scores
from megatron.quant import site_types

SITE_TYPES = site_types(__file__)
"""

BRANCH = """
attend = without_scores(self, SITE_TYPES, query, key, attention_mask)
if attend is not None:
    return attend(qk_operands, query, key, value, tensor_parallel.get_cuda_rng_tracker())
"""

GROUPS = "self.num_attention_heads_per_partition // self.num_query_groups_per_partition > 1"

FILES = (
    FileEdits(
        "megatron/core/transformer/dot_product_attention.py",
        (
            AddImport(IMPORTS.lstrip()),
            InsertBefore("DotProductAttention.forward", (Anchor(GROUPS),), BRANCH.lstrip()),
        ),
    ),
)
