"""Call our hooks on every rank: around steps, before validations, and around checkpoints."""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, PrependBody, ReplaceExpression

CHECKPOINTING = "megatron/training/checkpointing.py"
CHECKPOINTS = (
    AddImport("import mqo.megatron.hooks"),
    PrependBody("check_checkpoint_args", "mqo.megatron.hooks.note_checkpoint(checkpoint_args)\n"),
    ReplaceExpression(
        "load_args_from_checkpoint",
        Anchor("state_dict['args']"),
        "mqo.megatron.hooks.checked_arguments(state_dict['args'])",
    ),
    PrependBody(
        "load_checkpoint", "mqo.megatron.hooks.before_load(get_args(), load_arg, ddp_model)\n"
    ),
    PrependBody(
        "save_checkpoint",
        "if not non_persistent_ckpt:\n    mqo.megatron.hooks.before_save(get_args(), iteration)\n",
    ),
)
# 0.17.0 writes no hashes and has no --verify-integrity.
HASHES = ReplaceExpression(
    "_load_global_dist_base_checkpoint",
    Anchor("args.verify_integrity"),
    "mqo.megatron.hooks.to_verify(args, checkpoint_name)",
)

FILES = (
    FileEdits(
        "megatron/training/training.py",
        (
            AddImport("import mqo.megatron.hooks"),
            PrependBody(
                "train_step", "mqo.megatron.hooks.before_step(model, get_args(), optimizer)\n"
            ),
            PrependBody(
                "post_training_step_callbacks", "mqo.megatron.hooks.after_step(iteration)\n"
            ),
            PrependBody(
                "evaluate_and_print_results",
                "mqo.megatron.hooks.before_validation(model, get_args(), iteration)\n",
            ),
        ),
    ),
    FileEdits(
        "megatron/core/optimizer_param_scheduler.py",
        (
            PrependBody(
                "OptimizerParamScheduler._check_and_set",
                "from mqo.megatron.hooks import check_schedule\n\n"
                "check_schedule(self, cls_value, sd_value, name)\n",
            ),
        ),
    ),
    FileEdits(CHECKPOINTING, CHECKPOINTS, versions="<0.17.1"),
    FileEdits(CHECKPOINTING, (*CHECKPOINTS, HASHES), versions=">=0.17.1"),
)
