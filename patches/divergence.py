"""Where a step's loss or gradients are not finite: the run ends in our words, on every rank."""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, ReplaceExpression

FILES = (
    FileEdits(
        "megatron/training/training.py",
        (
            AddImport("import mqo.megatron.hooks"),
            ReplaceExpression(
                "train_step",
                Anchor("rerun_state_machine.should_checkpoint_and_exit()"),
                "mqo.megatron.hooks.end_if_diverged(rerun_state_machine)",
            ),
        ),
    ),
    FileEdits(
        "megatron/core/rerun_state_machine.py",
        (
            # The first step of a process is not looked at, for there may be nothing to save then.
            # Nothing is saved here, and a NaN would go into the weights.
            ReplaceExpression(
                "RerunStateMachine.validate_result",
                Anchor("self.first_iteration_complete"),
                "True",
            ),
        ),
    ),
)
