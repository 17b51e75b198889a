"""The model of the training programs: a plain one, or a student with the teacher it learns from."""

from argparse import Namespace
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from mqo.megatron.layers import label_layers
from mqo.megatron.run import engine, modelopt
from mqo.megatron.run.errors import DistillationError
from mqo.megatron.run.gpt_blocks import PATTERN
from mqo.quant.labels import exempt

from ..arguments import TEACHER_ARG
from ..checkpointing import accept_other_names, load_teacher
from . import releases


def model_provider(
    pre_process: bool | None = True,
    post_process: bool | None = True,
    parallel_output: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> LanguageModule:
    """Build this rank's part of the model of upstream's arguments; its layers get their names.

    Its ModelOpt state is that of the checkpoint that will be loaded, if there is one; the weights
    there may have other names (`accept_other_names`). With a teacher in the arguments the model is
    a student with its teacher.

    Args:
        pre_process: whether the embedding is part of it; None lets the pipeline stage decide.
        post_process: the same for the output layer.
        parallel_output: each tensor rank keeps its part of the logits.
        vp_stage: the chunk of an interleaved pipeline.
        config: that of the arguments, if it was built before.
        pg_collection: not read; upstream's trainer passes that of the arguments.

    Raises:
        CheckpointError: ModelOpt's state of the checkpoint cannot be restored.
        DistillationError: as `distilled`.
    """
    del pg_collection
    args = get_args()
    model = releases.build(
        args,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=parallel_output,
        vp_stage=vp_stage,
        config=config,
    )
    accept_other_names(model)
    model = distilled(modelopt.restore(model, args), args)
    label_layers(model)
    engine.prepare([model], args)
    return model


def distilled(student: LanguageModule, args: Namespace) -> LanguageModule:
    """Attach the teacher in `args` to `student`; return the changed model.

    Without a teacher nothing changes. With --export-kd-finalize, modules that a distillation added
    are removed.

    Raises:
        DistillationError: the teacher is missing, does not fit, or the configuration is wrong.
    """
    if getattr(args, "export_kd_finalize", False):
        return finalized(student)
    teacher_folder = getattr(args, TEACHER_ARG, None)
    if not teacher_folder:
        return student
    import modelopt.torch.distill as mtd  # takes seconds

    from ..algos.distillation import (
        adjust_distillation_model_for_mcore,
        check_layers,
        load_distillation_config,
    )
    from .teacher_config import load_teacher_config

    check_run(args)
    teacher_args = load_teacher_config(teacher_folder, args)
    check_stages(args, teacher_args)
    config = load_distillation_config(
        args.export_kd_cfg, student.config, core_transformer_config_from_args(teacher_args)
    )
    if not config["skip_lm_loss"]:
        check_lm_loss(args)
    parts = ("pre_process", "post_process", "parallel_output")
    teacher = _teacher_provider(teacher_args, {name: getattr(student, name) for name in parts})
    check_layers(student, teacher, config["criterion"])
    mode = {"teacher_model": teacher} | {k: config[k] for k in ("criterion", "loss_balancer")}
    return adjust_distillation_model_for_mcore(
        mtd.convert(student, mode=[("kd_loss", mode)]), config
    )


def finalized(student: LanguageModule) -> LanguageModule:
    """Return the student without the modules that a distillation added."""
    import modelopt.torch.distill as mtd  # takes seconds

    return mtd.export(student) if isinstance(student, mtd.DistillationModel) else student


def _teacher_provider(config: Namespace, model_kwargs: dict[str, Any]) -> LanguageModule:
    """Build the teacher with the weights of its checkpoint, frozen and unquantized.

    `config` are the arguments from `load_teacher_config`; `model_kwargs` those of `model_provider`.
    """
    teacher = releases.build(config, **model_kwargs)
    load_teacher(teacher, get_args())
    return exempt(teacher.requires_grad_(False).eval())


def check_run(args: Namespace) -> None:
    """Raise DistillationError if `args` set options that a distillation does not support."""
    if args.virtual_pipeline_model_parallel_size:
        raise DistillationError(
            "A distillation does not support an interleaved pipeline",
            expected="no --num-layers-per-virtual-pipeline-stage",
        )
    if args.calculate_per_token_loss:
        raise DistillationError(
            "A distillation's losses are already means over tokens",
            expected="no --calculate-per-token-loss",
        )


def check_stages(student: Namespace, teacher: Namespace) -> None:
    """Raise DistillationError for a HybridModel in pipeline stages, whose layers differ there."""
    patterns = [getattr(args, PATTERN, None) for args in (student, teacher)]
    if any(patterns) and student.pipeline_model_parallel_size > 1:
        raise DistillationError(
            "A distillation does not support a HybridModel in pipeline stages",
            expected="--pipeline-model-parallel-size 1, or two GPTs",
        )


def check_lm_loss(args: Namespace) -> None:
    """Raise DistillationError if the student's own loss would overwrite the compared logits.

    Of upstream's fused losses, the native one does so for fp32 logits, and TE's always.
    """
    impl = args.cross_entropy_fusion_impl
    writes = impl == "te" or args.params_dtype == torch.float32
    if args.cross_entropy_loss_fusion and writes:
        raise DistillationError(
            f"The {impl} fused cross-entropy overwrites the compared logits",
            expected="no --cross-entropy-loss-fusion, or skip_lm_loss: true",
        )
