"""Calls before and after every training step, on every rank, and when a checkpoint is read."""

from mqo.overlay.edits import AddImport, FileEdits, PrependBody

FILES = (
    FileEdits(
        "megatron/training/training.py",
        (
            AddImport("import megatron.run"),
            PrependBody("train_step", "megatron.run.before_step(model, get_args())\n"),
            PrependBody("post_training_step_callbacks", "megatron.run.after_step(iteration)\n"),
        ),
    ),
    FileEdits(
        "megatron/training/checkpointing.py",
        (
            AddImport("import megatron.run"),
            PrependBody("check_checkpoint_args", "megatron.run.note_checkpoint(checkpoint_args)\n"),
        ),
    ),
)
