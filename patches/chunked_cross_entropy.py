"""Replace upstream's cross-entropy over a split vocabulary by one that works in chunks of tokens.

Label smoothing still uses upstream's path. Its fused losses are other functions.
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
# Since 0.19 callers may pass the group.
GIVEN = f"{GROUP} if tp_group is None else tp_group"


def routed(group: str, versions: str) -> FileEdits:
    """Return the edits that route the loss; `group` is the expression for its ranks."""
    body = CHUNKED.format(group=group).lstrip()
    return FileEdits(PATH, (IMPORT, PrependBody(LOSS, body)), versions)


FILES = (routed(GROUP, "<0.19"), routed(GIVEN, ">=0.19"))
