"""A call before and one after every training step, on every rank: `before_step`, `after_step`."""

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
)
