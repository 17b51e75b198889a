"""Load a GPT's checkpoint into a HybridModel by our own map of layers.

Upstream's refuses MLA and blocks of which only some have experts.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, ReplaceExpression

FILES = (
    FileEdits(
        "megatron/training/checkpointing.py",
        (
            AddImport("from mqo.megatron.hooks import layer_maps, retarget"),
            ReplaceExpression(
                "load_checkpoint", Anchor("_maybe_setup_gpt_to_hybrid_load"), "layer_maps"
            ),
            ReplaceExpression(
                "load_checkpoint",
                Anchor(
                    "retarget_sharded_state_dict_to_gpt_checkpoint(sub_sd, gpt_compat_layer_maps)"
                ),
                "retarget(sub_sd, gpt_compat_layer_maps, checkpoint_name)",
            ),
        ),
    ),
)
