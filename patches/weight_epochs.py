"""Says when weights change, for the cache of quantized ones.

No forward pass runs inside of these functions, so the cache is filled again after they are done:
with a distributed optimizer that gathers in the forward pass, after the gathering.
"""

from mqo.overlay.edits import AddImport, FileEdits, PrependBody

IMPORT = AddImport("from mqo.quant import weights_changed")
CALL = "weights_changed()\n"

FILES = (
    FileEdits(
        "megatron/core/optimizer/optimizer.py",
        (
            IMPORT,
            # Every other optimizer is made of these, or derives from them.
            PrependBody("MixedPrecisionOptimizer.step_with_ready_grads", CALL),
            PrependBody("FP32Optimizer.step_with_ready_grads", CALL),
        ),
    ),
    FileEdits("megatron/training/checkpointing.py", (IMPORT, PrependBody("load_checkpoint", CALL))),
)
