"""Add a branch to local attention before the s x s scores are allocated.

The branch comes after the QK literal, so that all paths read it, and before grouped keys are
repeated. The PV literal comes later; its value is read from the source once, at import. Upstream's
own path refuses packed sequences; here they reach the branch, which may accept them.

Autograd multiplies in the backward pass, so the source has no calls to wrap. The literals of these
products are in a function of their own, whose quantizers the branch passes on.
"""

from textwrap import indent

from mqo.overlay.edits import AddImport, Anchor, FileEdits, InsertBefore, ReplaceExpression
from mqo.quant.formats import ATTENTION_BACKWARD

IMPORTS = """
from mqo.megatron.attention.backward import BackwardOperands
from mqo.megatron.attention.choice import without_scores
from mqo.quant import site_types

SITE_TYPES = site_types(__file__)
"""

BACKWARD = "def attention_backward_operands(layer):\n" + indent(
    '"""Return the quantizers of the products of attention\'s backward pass."""\n'
    + "".join(
        "custom_quant_type = 'none'\n"
        f"{site}_operands = gemm_operands('{site}', custom_quant_type, layer)\n"
        for site in ATTENTION_BACKWARD
    )
    + "return BackwardOperands(\n"
    + "".join(f"    {site}={site}_operands,\n" for site in ATTENTION_BACKWARD)
    + ")\n",
    "    ",
)

BRANCH = """
backward_operands = attention_backward_operands(self)
attend = without_scores(
    self, SITE_TYPES, query, key, attention_mask, packed_seq_params, backward_operands
)
if attend is not None:
    return attend(qk_operands, query, key, value, tensor_parallel.get_cuda_rng_tracker())
"""

GROUPS = "self.num_attention_heads_per_partition // self.num_query_groups_per_partition > 1"

FILES = (
    FileEdits(
        "megatron/core/transformer/dot_product_attention.py",
        (
            AddImport(f"{IMPORTS.lstrip()}\n\n{BACKWARD}"),
            ReplaceExpression(
                "DotProductAttention.forward",
                Anchor("packed_seq_params is None"),
                "packed_seq_params is None or packed_seq_params.qkv_format == 'thd'",
            ),
            InsertBefore("DotProductAttention.forward", (Anchor(GROUPS),), BRANCH.lstrip()),
        ),
    ),
)
