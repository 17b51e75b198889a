"""Train a GPT that learns from a teacher: pretrain_gpt.py with the flags --export-kd-*.

Data, batches and the trainer are those of pretrain_gpt.py, model and loss of megatron.inference.
"""

# First, for its check: no other megatron may be imported instead of this tree's.
import preflight  # isort: skip

preflight.disable_gc(__name__)

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pretrain_gpt as plain
import torch
from megatron.core.utils import unwrap_model
from megatron.inference.algos.distillation import widened_shapes
from megatron.inference.arguments import add_modelopt_args
from megatron.inference.gpt.loss_func import loss_func
from megatron.inference.gpt.model_provider import distilled
from megatron.inference.gpt.steps import with_steps
from megatron.training import training
from megatron.training.models.gpt import GPTModelConfig
from torch import Tensor


def checked_loss(
    loss_mask: Tensor, model: torch.nn.Module, output_tensor: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of `loss_func`; end the run if a loss is not a number."""
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
    """Return the configuration of pretrain_gpt.py, which attaches a teacher before wrapping."""
    choose = training.get_forward_backward_func
    training.get_forward_backward_func = lambda **given: with_steps(
        # The trainer gets shapes from ModelOpt only with a package that no wheel contains.
        with_widened_shapes(choose(**given))
        if args.pipeline_model_parallel_size > 1
        else choose(**given)
    )
    config = plain.model_config()
    config.pre_wrap_hooks.append(lambda chunks: [distilled(chunk, args) for chunk in chunks])
    return config


def with_widened_shapes(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the schedule with room for both models' hidden states between stages."""

    def run(*, model: list[torch.nn.Module], **rest: Any) -> Any:
        (student,) = unwrap_model(model)
        if hasattr(student, "teacher_model"):
            rest["adjust_tensor_shapes_fn"] = widened_shapes(student)
        return schedule(model=model, **rest)

    return run


if __name__ == "__main__":
    preflight.check_origin(("megatron.inference",))
    plain.main(model_config, forward_step, add_modelopt_args)
