"""Count multi-latent attention in the FLOPs of a HybridModel, which upstream leaves out."""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, InsertBefore

FILES = (
    FileEdits(
        "megatron/training/training.py",
        (
            AddImport("from mqo.megatron.flops import with_latent_attention"),
            InsertBefore(
                "num_floating_point_operations",
                (Anchor("get_hybrid_layer_counts(args.hybrid_layer_pattern)"),),
                "hybrid_flops = with_latent_attention("
                "hybrid_flops, args, num_floating_point_operations)\n",
            ),
        ),
    ),
)
