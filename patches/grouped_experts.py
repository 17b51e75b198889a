"""Run the experts of local layers as one grouped GEMM with --moe-grouped-gemm."""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, ReplaceExpression

FILES = (
    FileEdits(
        "megatron/core/models/backends.py",
        (
            AddImport("from mqo.megatron.experts import experts_class"),
            ReplaceExpression(
                "LocalSpecProvider.grouped_mlp_modules",
                Anchor("SequentialMLP"),
                "experts_class(moe_use_grouped_gemm, SequentialMLP)",
            ),
        ),
    ),
    FileEdits(
        "megatron/training/arguments.py",
        (
            # Upstream requires a GPU architecture for another package's kernels.
            ReplaceExpression(
                "validate_args",
                Anchor("args.moe_grouped_gemm"),
                '(args.moe_grouped_gemm and args.transformer_impl != "local")',
            ),
        ),
    ),
)
