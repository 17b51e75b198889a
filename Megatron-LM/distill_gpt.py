"""Trains a GPT that learns from a teacher: pretrain_gpt.py with the flags --export-kd-*.

Data, batches and the trainer are pretrain_gpt.py's; model and loss are megatron.inference's.
"""

# First, for its check: no other megatron may be imported in the place of this tree's.
import preflight  # isort: skip

preflight.disable_gc(__name__)

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron.run
import megatron.run.start
import pretrain_gpt as plain
import torch
from megatron.core.enums import ModelType
from megatron.core.utils import unwrap_model
from megatron.inference.algos.distillation import widened_shapes
from megatron.inference.arguments import add_modelopt_args
from megatron.inference.gpt.loss_func import loss_func
from megatron.inference.gpt.model_provider import distilled
from megatron.training import get_tensorboard_writer, pretrain, set_startup_timestamps, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.gpt import GPTModelConfig
from torch import Tensor


def checked_loss(
    loss_mask: Tensor, model: torch.nn.Module, output_tensor: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what `loss_func` does; end the run over a loss that is no number."""
    loss, report = loss_func(loss_mask, model, output_tensor)
    plain.check_loss(loss)
    return loss, report


def forward_step(
    data_iterator: Iterator[plain.Batch] | None, model: torch.nn.Module
) -> tuple[Tensor, partial]:
    """Run a micro-batch through student and teacher; the schedule calls the returned loss."""
    output, loss = plain.forward_step(data_iterator, model)
    (loss_mask,) = loss.args
    return output, partial(checked_loss, loss_mask, model)


def model_config(args: Namespace) -> GPTModelConfig:
    """Return pretrain_gpt.py's, with a teacher joined to the student before that is wrapped."""
    config = plain.model_config()
    config.pre_wrap_hooks.append(lambda chunks: [distilled(chunk, args) for chunk in chunks])
    return config


def with_widened_shapes(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """The pipeline's schedule, which makes room for both models' hidden states on their way."""

    def run(*, model: list[torch.nn.Module], **rest: Any) -> Any:
        (student,) = unwrap_model(model)
        if hasattr(student, "teacher_model"):
            rest["adjust_tensor_shapes_fn"] = widened_shapes(student)
        return schedule(model=model, **rest)

    return run


def main() -> None:
    """Train as the command line says."""
    preflight.check_origin(("megatron.inference",))
    set_startup_timestamps(program_start=preflight.PROGRAM_START, main_entry=time.time())
    with megatron.run.start.quick_sources():
        args = parse_and_validate_args(extra_args_provider=add_modelopt_args)
    if args.pipeline_model_parallel_size > 1:
        # The trainer asks ModelOpt for shapes only where a package is that no wheel holds.
        choose = training.get_forward_backward_func
        training.get_forward_backward_func = lambda **given: with_widened_shapes(choose(**given))
    gc.enable()
    with megatron.run.recorded(get_tensorboard_writer()):
        megatron.run.before_model(args)
        megatron.run.check_available(args)
        megatron.run.label_timers(args)
        plain.datasets_provider.is_distributed = True
        pretrain(
            pretrain_cfg_container_from_args(args, model_config(args)),
            plain.datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
        )


if __name__ == "__main__":
    main()
