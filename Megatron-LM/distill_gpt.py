"""Train a GPT that learns from a teacher: pretrain_gpt.py with the flags --export-kd-*.

Data, batches and the trainer are those of pretrain_gpt.py. model_provider attaches the teacher.
"""

# First, for its check: no other megatron may be imported instead of this tree's.
import preflight  # isort: skip

preflight.disable_gc(__name__)
preflight.check_origin(("megatron.inference",))

# Before megatron.core, whose decorators call torch.compile.
from megatron.inference.gpt import pretraining  # isort: skip

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.inference.algos.distillation import widened_shapes
from megatron.inference.arguments import add_modelopt_args
from megatron.inference.gpt.batches import Batch
from megatron.inference.gpt.loss_func import loss_func
from megatron.inference.gpt.steps import with_steps
from megatron.training import get_args, training
from torch import Tensor


def checked_loss(
    loss_mask: Tensor, model: torch.nn.Module, output_tensor: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of `loss_func`; end the run if a loss is not a number."""
    loss, report = loss_func(loss_mask, model, output_tensor)
    pretraining.check_loss(loss)
    return loss, report


def forward_step(
    data_iterator: Iterator[Batch] | None, model: torch.nn.Module
) -> tuple[Tensor, partial]:
    """Run a micro-batch through student and teacher; the schedule calls the returned loss."""
    output, loss = pretraining.forward_step(data_iterator, model)
    (loss_mask,) = loss.args
    return output, partial(checked_loss, loss_mask, model)


def balance_steps() -> None:
    """Make the trainer average and balance the losses of a step, with room for both models."""
    choose = training.get_forward_backward_func

    def chosen(**given: Any) -> Callable[..., Any]:
        schedule = choose(**given)
        # The trainer gets shapes from ModelOpt only with a package that no wheel contains.
        if get_args().pipeline_model_parallel_size > 1:
            schedule = with_widened_shapes(schedule)
        return with_steps(schedule)

    training.get_forward_backward_func = chosen


def with_widened_shapes(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the schedule with room for both models' hidden states between stages."""

    def run(*, model: list[torch.nn.Module], **rest: Any) -> Any:
        (student,) = unwrap_model(model)
        if hasattr(student, "teacher_model"):
            rest["adjust_tensor_shapes_fn"] = widened_shapes(student)
        return schedule(model=model, **rest)

    return run


if __name__ == "__main__":
    balance_steps()
    pretraining.main(preflight.PROGRAM_START, forward_step, add_modelopt_args)
