"""Fix resuming with the distributed optimizer on torch's own Adam, and in fp32.

Without Transformer Engine and apex, upstream reads Adam's step count from the state of its
parameters. A resumed run reads it before that state is loaded, when it is 0. After loading, one
tensor held the count of all parameters, and Adam incremented it once per parameter. The count was
looked up per parameter, but checkpoints store it per group. In fp32 a main parameter is a view of
a model parameter, and autograd forbids writing to that in place.
"""

from mqo.overlay.edits import Anchor, FileEdits, InsertBefore, ReplaceExpression, WrapOperands

STEPS = 'list(set([s["step"].item() for s in inner_state_dict["state"].values()]))'
COUNT = 's["step"] = step'
FOUND = Anchor("not isinstance(tensors[key], torch.Tensor)", versions=">=0.17")
PLACE = "dst_tensors[key].copy_"

SAVE = "DistributedOptimizer.state_dict"
LOAD = "DistributedOptimizer.load_state_dict"
SET = "DistributedOptimizer._set_main_param_and_optimizer_states"

FILES = (
    FileEdits(
        "megatron/core/optimizer/distrib_optimizer.py",
        (
            ReplaceExpression(SAVE, Anchor(STEPS), f"({STEPS} or [0])"),
            WrapOperands(LOAD, (Anchor(COUNT),), {"step": "torch.clone"}),
            InsertBefore(SET, (FOUND, Anchor(PLACE)), 'if key == "step":\n    continue\n'),
            ReplaceExpression(SET, Anchor(PLACE), "dst_tensors[key].detach().copy_"),
        ),
    ),
)
