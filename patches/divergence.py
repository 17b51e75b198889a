"""End a run on every rank, with our error, if the loss or gradients of a step are not finite."""

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
            # Upstream skips the first step of a process, because there may be nothing to save.
            # Here nothing is saved, and a NaN would reach the weights.
            ReplaceExpression(
                "RerunStateMachine.validate_result",
                Anchor("self.first_iteration_complete"),
                "True",
            ),
        ),
    ),
)
