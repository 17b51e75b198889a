"""Routes upstream's cross-entropy over a split vocabulary to one that works in chunks of tokens.

Upstream's own path stays for label smoothing, and its fused losses are other functions.
"""

from mqo.overlay.edits import AddImport, FileEdits, PrependBody

PATH = "megatron/core/tensor_parallel/cross_entropy.py"
LOSS = "vocab_parallel_cross_entropy"
IMPORT = AddImport("from mqo.megatron.losses import chunked_cross_entropy")
CHUNKED = """
if label_smoothing == 0:
    return chunked_cross_entropy(vocab_parallel_logits, target, {group})
"""
GROUP = "get_tensor_model_parallel_group()"
# Callers may name the group since 0.19.
GIVEN = f"{GROUP} if tp_group is None else tp_group"


def routed(group: str, versions: str) -> FileEdits:
    """Route the loss, over the ranks that the expression `group` gives."""
    body = CHUNKED.format(group=group).lstrip()
    return FileEdits(PATH, (IMPORT, PrependBody(LOSS, body)), versions)


FILES = (routed(GROUP, "<0.19"), routed(GIVEN, ">=0.19"))
