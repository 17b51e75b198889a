"""Build upstream's HybridModel without Transformer Engine, and scale its rotary positions.

Upstream builds Transformer Engine's norm after the last layer, and never scales the positions.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, ReplaceExpression

FILES = (
    FileEdits(
        "megatron/core/models/hybrid/hybrid_block.py",
        (
            AddImport("from mqo.megatron.norms import stack_norm"),
            ReplaceExpression(
                "HybridStack.__init__", Anchor("TENorm"), "stack_norm(submodules, TENorm)"
            ),
        ),
    ),
    FileEdits(
        "megatron/core/models/hybrid/hybrid_model.py",
        (
            AddImport("from mqo.megatron.rotary import scaled"),
            ReplaceExpression(
                "HybridModel.__init__", Anchor("RotaryEmbedding"), "scaled(RotaryEmbedding, config)"
            ),
        ),
    ),
)
