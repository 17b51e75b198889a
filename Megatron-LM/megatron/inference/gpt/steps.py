"""Average and balance the losses of a distillation over a step, for any split of its batch.

A step trains on S + k c (L + r I): the student's own loss S, the logits loss L and the mean I of
the intermediate losses, each a mean over all counted tokens of the global batch, with the factors
r = L / I and c = S / (L + r I). The gradient is a sum over micro-batches and data-parallel ranks.
So all of them need the same r and c, and their weights must be proportional to their tokens:

- Tokens are counted in the data, before any pass.
- One micro-batch per rank: its losses are averaged over ranks between forward and backward.
- Several: a forward pass over all of them comes first, for the values of S, L and I. It draws the
  same random numbers as the training pass, and is not recorded. Only the student runs twice: the
  outputs of the teacher's layers are kept (`TeacherOutputs`).

Without factors (only the logits are compared) this pass is left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import _fork_rng
from megatron.core.utils import unwrap_model
from mqo.megatron.device import accelerator_type
from mqo.quant.quantization import PROCESS
from torch import Tensor
from torch.distributed import all_reduce

from ..algos.distillation import LossValues
from ..algos.teacher_outputs import TeacherOutputs
from .loss_func import Step, averaged

Batches = list[dict[str, Tensor]] | None


def with_steps(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the schedule so that losses are averaged and balanced over each training step.

    Evaluation, models without a teacher and `balance: micro_batch` do not change.
    """

    def run(*, model: list[torch.nn.Module], forward_only: bool = False, **given: Any) -> Any:
        (student,) = unwrap_model(model)
        if forward_only or not getattr(student, "balances_steps", False):
            return schedule(model=model, forward_only=forward_only, **given)
        return _train(partial(schedule, model=model), student, **given)

    return run


def _train(
    schedule: Callable[..., Any],
    student: torch.nn.Module,
    *,
    data_iterator: Iterator | list[Iterator] | None,
    num_microbatches: int,
    **given: Any,
) -> Any:
    """Run a step, after a first forward pass if the balance needs its losses."""
    batches = _read(data_iterator, num_microbatches)
    tokens = _mean_tokens(batches, num_microbatches)

    def run(step: Step, *, forward_only: bool) -> Any:
        data = None if batches is None else iter(batches)
        with _sharing(student, step):
            return schedule(
                data_iterator=data,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                **given,
            )

    if not student.has_factors:
        return run(Step(tokens), forward_only=False)
    if num_microbatches == 1:
        return run(Step(tokens, averaged), forward_only=False)
    teacher = TeacherOutputs(student)
    with torch.no_grad(), PROCESS.extra_pass(), _fork_rng(), teacher.kept():
        values = _mean(run(Step(tokens), forward_only=True))
    with teacher.repeated():
        return run(Step(tokens, lambda of_micro_batch: values), forward_only=False)


def _read(data_iterator: Iterator | list[Iterator] | None, count: int) -> Batches:
    """Return the step's micro-batches; None on a rank that reads no data."""
    if isinstance(data_iterator, list):
        (data_iterator,) = data_iterator
    return None if data_iterator is None else [next(data_iterator) for _ in range(count)]


def _mean_tokens(batches: Batches, count: int) -> Tensor:
    """Return the mean number of counted tokens per micro-batch, over the step and all ranks.

    It is a collective of the last pipeline stage, which computes losses; other stages return their
    own count.
    """
    counts = [batch["loss_mask"].sum(dtype=torch.float64) for batch in batches or ()]
    tokens = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.float64)
    tokens = tokens.to(accelerator_type())
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        # Only one rank of a tensor-parallel group reads data.
        all_reduce(tokens, group=parallel_state.get_tensor_model_parallel_group())
        all_reduce(tokens, group=parallel_state.get_data_parallel_group())
    return (tokens.clamp(min=1) / (count * parallel_state.get_data_parallel_world_size())).float()


def _mean(reports: list[LossValues]) -> LossValues:
    """Return the mean of each loss over micro-batches; {} on a stage that computes no losses."""
    names = reports[0] if reports else ()
    return {name: torch.stack([report[name] for report in reports]).mean() for name in names}


@contextmanager
def _sharing(student: Any, step: Step) -> Iterator[None]:
    """In this block, let the loss function find `step` on the student."""
    student.kd_step = step
    try:
        yield
    finally:
        del student.kd_step
