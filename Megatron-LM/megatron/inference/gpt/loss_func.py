"""The loss of a GPT, with or without a teacher."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed import all_reduce

from ..algos.distillation import LM_LOSS, LossValues

KD_LOSS = "kd loss"


@dataclass(frozen=True)
class Step:
    """Values that the micro-batches of a training step share.

    tokens: the mean number of counted tokens per micro-batch, over the step's micro-batches and
    data-parallel ranks. reference: the value for the loss balancer's attribute of this name.
    """

    tokens: Tensor
    reference: Callable[[LossValues], LossValues] | None = None


def loss_func(
    loss_mask: Tensor, model: LanguageModule, output_tensor: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the training loss, and all losses for the report.

    Args:
        loss_mask: [b, s], 0 for tokens that do not count.
        model: as the trainer holds it. With a teacher, the training loss is the balanced loss; in
            evaluation, and without a teacher, it is the loss of the language model. The attribute
            `kd_step`, if present, is the Step that this micro-batch is part of.
        output_tensor: [b, s], the cross entropy of each token in nats.

    Returns:
        The mean over the micro-batch's tokens on all context-parallel ranks, with this rank's part
        of the gradient; the schedule multiplies by the number of these ranks. 0 if no token counts.
        In a Step the sum is divided by `Step.tokens` instead, so that the mean over micro-batches
        and data-parallel ranks is the mean over all tokens of the step.
        And {name: mean over the data-parallel ranks}: "lm loss"; in training with a teacher also
        "kd loss", the balanced one, and its parts.
    """
    mask = loss_mask.reshape(-1).float()
    model = unwrap_model(model)
    step: Step | None = getattr(model, "kd_step", None)
    tokens = step.tokens if step else _over_context_ranks(mask.sum()).clamp(min=1)

    def mean(of_tokens: Tensor) -> Tensor:
        own = torch.sum(of_tokens.reshape(-1).float() * mask)
        whole = _over_context_ranks(own.detach().clone())
        return (own + (whole - own.detach())) / tokens

    loss = mean(output_tensor)
    report = {LM_LOSS: loss}
    if model.training and hasattr(model, "compute_kd_loss"):
        balancer = model.loss_balancer
        balancer.reference = step.reference if step else None
        loss = model.compute_kd_loss(student_loss=loss, loss_reduction_fn=mean)
        report |= {KD_LOSS: loss, **balancer.parts}
    return loss, averaged(report)


def _over_context_ranks(own: Tensor) -> Tensor:
    """Sum over the ranks that share a sequence, in place."""
    if parallel_state.get_context_parallel_world_size() > 1:
        all_reduce(own, group=parallel_state.get_context_parallel_group())
    return own


def averaged(losses: LossValues) -> LossValues:
    """Average each loss, detached, over the data-parallel ranks."""
    values = torch.stack([loss.detach().float() for loss in losses.values()])
    group = parallel_state.get_data_parallel_group()
    all_reduce(values, group=group)
    return dict(zip(losses, values / group.size(), strict=True))
