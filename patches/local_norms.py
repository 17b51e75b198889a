"""Chooses norms that can compute the model's normalization, with any installed packages.

With apex present upstream builds its FusedLayerNorm for RMSNorm, too, and ends there; with
Transformer Engine present it ends a stack of local layers with that package's norm.
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
            # Upstream keeps RMSNorm from apex here, and from then on LayerNorm, too.
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
