"""Move the trainer's guarded imports of ModelOpt after that of the other package they need.

Upstream imports ModelOpt first, which takes about ten seconds, and then fails if
megatron.post_training is missing, as in every wheel. In the other order it fails at once.
"""

from mqo.overlay.edits import Anchor, FileEdits, InsertBefore

NEEDED = "import megatron.post_training\n"
SAVE = "from modelopt.torch.opt.plugins import save_modelopt_state, save_sharded_modelopt_state"
DISTILL = (
    "from modelopt.torch.distill.plugins.megatron"
    " import get_tensor_shapes_adjust_fn_for_distillation"
)

# Since 0.20 checkpointing.py imports only megatron.post_training.
FILES = tuple(
    FileEdits(f"megatron/training/{name}", (InsertBefore("", (Anchor(pattern),), NEEDED),), where)
    for name, pattern, where in (("checkpointing.py", SAVE, "<0.20"), ("training.py", DISTILL, ""))
)
