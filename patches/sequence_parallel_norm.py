"""Allow torch's norms with sequence parallelism, which upstream refuses.

A rank normalizes its share of the tokens, so the gradients of the weights of a norm must be summed
over the tensor-parallel ranks. Upstream does that for all weights with this attribute.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, ReplaceExpression

MARKED = """
import torch


def marked(norm: torch.nn.Module, sequence_parallel: bool) -> torch.nn.Module:
    for weight in norm.parameters():
        weight.sequence_parallel = sequence_parallel
    return norm
"""

NEW = "WrappedTorchNorm.__new__"
MADE = "norm_cls(normalized_shape=hidden_size, eps=eps)"

FILES = (
    FileEdits(
        "megatron/core/transformer/torch_norm.py",
        (
            AddImport(MARKED.lstrip()),
            ReplaceExpression(NEW, Anchor("not config.sequence_parallel"), "True"),
            ReplaceExpression(NEW, Anchor(MADE), f"marked({MADE}, config.sequence_parallel)"),
        ),
    ),
)
