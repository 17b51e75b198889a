"""Tell the cache of quantized weights when weights change.

No forward pass runs inside these functions, so the cache is filled again after they return. With
a distributed optimizer that gathers weights in the forward pass, that is after the gathering.
"""

from mqo.overlay.edits import AddImport, FileEdits, PrependBody

IMPORT = AddImport("from mqo.quant import weights_changed")
CALL = "weights_changed()\n"

FILES = (
    FileEdits(
        "megatron/core/optimizer/optimizer.py",
        (
            IMPORT,
            # Every other optimizer contains these or derives from them.
            PrependBody("MixedPrecisionOptimizer.step_with_ready_grads", CALL),
            PrependBody("FP32Optimizer.step_with_ready_grads", CALL),
        ),
    ),
    FileEdits("megatron/training/checkpointing.py", (IMPORT, PrependBody("load_checkpoint", CALL))),
)
