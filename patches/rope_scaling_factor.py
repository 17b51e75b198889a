"""Pass --rope-scaling-factor from the arguments to the model's configuration."""

from mqo.overlay.edits import Anchor, FileEdits, InsertBefore

FILES = (
    FileEdits(
        "megatron/training/argument_utils.py",
        (
            InsertBefore(
                "gpt_config_from_args",
                (Anchor("return model_config_cls(**kwargs)"),),
                'kwargs["rope_scaling_factor"] = args.rope_scaling_factor\n',
            ),
        ),
    ),
)
