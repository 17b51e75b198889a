"""Train a GPT with upstream's trainer and flags: the loss, the forward step, and the start.

The wheel of Megatron lacks these. Everything else (arguments, schedules, checkpoints, the training
loop) is in megatron.training.
"""

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial

import mqo.megatron.hooks
import mqo.megatron.run.start
import torch

mqo.megatron.run.start.compile_late()  # before megatron.core is imported
mqo.megatron.run.start.quicken_sources()

from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    set_startup_timestamps,
)
from torch import Tensor

from . import releases
from .batches import Batch, check_documents, datasets_provider, get_batch, packed_params
from .model_provider import model_provider


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the masked sum of the token losses, the number of tokens, and both for the report.

    `output_tensor`: [micro-batch, sequence], the cross entropy of each token in nats. Upstream's
    schedule divides by the tokens, and its report averages over the data-parallel ranks.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    check_loss(loss)
    report = torch.cat([loss.detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": report}


def check_loss(loss: Tensor) -> None:
    """End the run if the loss is NaN or infinite, unless this check is turned off.

    In training, upstream's rerun state machine records it, and all ranks end after the backward
    passes (mqo.megatron.hooks.end_if_diverged). If the machine is disabled, as in validation,
    raise DivergenceError.
    """
    if not get_args().check_for_nan_in_loss_and_grad:
        return
    machine = get_rerun_state_machine()
    if machine.get_mode() is RerunMode.DISABLED:
        mqo.megatron.hooks.check_finite_loss(loss.item())
        return
    for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        machine.validate_result(
            result=loss,
            rejection_func=rejected,
            message=f"{name} in the loss of this rank's micro-batch",
            tolerance=0.0,
            fatal=True,
        )


def forward_step(
    data_iterator: Iterator[Batch] | None, model: torch.nn.Module
) -> tuple[Tensor, partial]:
    """Run a micro-batch through the model; the schedule calls the returned loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_params(batch),
    )
    return output, partial(loss_func, batch["loss_mask"])


def main(
    program_start: float,
    step: Callable[..., tuple] = forward_step,
    extra_args: Callable | None = None,
) -> None:
    """Train with the flags of the command line.

    `program_start` is the time in seconds at which the program started, `step` its forward step.
    """
    set_startup_timestamps(program_start=program_start, main_entry=time.time())
    args = releases.parse(extra_args)
    gc.enable()
    check_documents(args)
    with mqo.megatron.hooks.recorded(get_tensorboard_writer()):
        mqo.megatron.hooks.check_available(args)
        mqo.megatron.hooks.before_model(args)
        mqo.megatron.hooks.label_timers(args)
        vars(datasets_provider).update(is_distributed=True)
        releases.train(args, datasets_provider, model_provider, step)
