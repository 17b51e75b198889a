"""One call after every training step, on every rank: `megatron.run.after_step`."""

from mqo.overlay.edits import AddImport, FileEdits, PrependBody

FILES = (
    FileEdits(
        "megatron/training/training.py",
        (
            AddImport("import megatron.run"),
            PrependBody("post_training_step_callbacks", "megatron.run.after_step(iteration)\n"),
        ),
    ),
)
