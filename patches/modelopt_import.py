"""The trainer's guarded imports of ModelOpt, behind the package that they need beside it.

Upstream imports ModelOpt first, for some ten seconds, and gives it up where megatron.post_training
is missing, as it is in every wheel. Asked in the other order it is given up at once.
"""

from mqo.overlay.edits import Anchor, FileEdits, InsertBefore

NEEDED = "import megatron.post_training\n"
SAVE = "from modelopt.torch.opt.plugins import save_modelopt_state, save_sharded_modelopt_state"
DISTILL = (
    "from modelopt.torch.distill.plugins.megatron"
    " import get_tensor_shapes_adjust_fn_for_distillation"
)

# Since 0.20 checkpointing.py imports megatron.post_training alone.
FILES = tuple(
    FileEdits(f"megatron/training/{name}", (InsertBefore("", (Anchor(pattern),), NEEDED),), where)
    for name, pattern, where in (("checkpointing.py", SAVE, "<0.20"), ("training.py", DISTILL, ""))
)
