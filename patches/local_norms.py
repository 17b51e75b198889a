"""Choose norms that can compute the model's normalization, whatever packages are installed.

With apex installed, upstream builds its FusedLayerNorm for RMSNorm, too, and fails. With
Transformer Engine installed, the last norm of a stack of local layers is that package's.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, ReplaceExpression

FILES = (
    FileEdits(
        "megatron/core/fusions/fused_layer_norm.py",
        (
            AddImport("from mqo.megatron.norms import LayerNormOnly"),
            ReplaceExpression("", Anchor("torch.nn.Module"), "LayerNormOnly"),
        ),
    ),
    FileEdits(
        "megatron/core/models/backends.py",
        (
            # Upstream avoids apex for RMSNorm here, and afterwards for LayerNorm, too.
            ReplaceExpression("LocalSpecProvider.layer_norm", Anchor("WrappedTorchNorm"), "LNImpl"),
        ),
        versions=">=0.13",
    ),
    FileEdits(
        "megatron/core/transformer/transformer_block.py",
        (
            AddImport("from mqo.megatron.norms import final_norm"),
            ReplaceExpression(
                "_get_block_submodules",
                Anchor("LayerNormImpl"),
                "final_norm(spec, LayerNormImpl)",
            ),
        ),
    ),
)
