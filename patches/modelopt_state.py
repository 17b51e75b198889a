"""Save ModelOpt's state in a checkpoint's folder, before the tracker names the checkpoint."""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, InsertBefore

SAVE = (
    "if not non_persistent_ckpt:\n"
    "    mqo.megatron.run.modelopt.save(model, checkpoint_name, args.ckpt_format)\n"
)

FILES = (
    FileEdits(
        "megatron/training/checkpointing.py",
        (
            AddImport("import mqo.megatron.run.modelopt"),
            InsertBefore("save_checkpoint", (Anchor("start_misc = time()"),), SAVE),
        ),
    ),
)
