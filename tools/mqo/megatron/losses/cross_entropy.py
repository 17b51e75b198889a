"""Compute cross-entropy over a vocabulary that tensor-parallel ranks may share."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp

from mqo.megatron.losses.chunks import as_rows, chunks, reduced, shifted


def chunked_cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Return the cross-entropy of each token in nats, in fp32, in the shape of `targets`.

    Each row goes through upstream's operations in upstream's order, and the same tensors are
    reduced over `group`. Loss and gradient therefore equal upstream's bit for bit on a device that
    sums a row in an order that does not depend on other rows, such as a CPU.

    The peak memory is `logits`, their gradient and one chunk in fp32. Unlike upstream's function,
    this one never writes to `logits`.

    Args:
        logits: [..., v]; v is this rank's part of the vocabulary. All parts have the same size.
        targets: [...], int64, indices into the whole vocabulary. The loss of a token with a target
            outside of it is log(sum(exp(logits - max))), as in upstream.
        group: the ranks that share the vocabulary; None if one rank holds all of it.
    """
    return _CrossEntropy.apply(logits, targets, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup | None) -> Tensor:
        rows, width = as_rows(logits), logits.size(-1)
        highest = reduced(rows.amax(-1).float(), ReduceOp.MAX, group)
        column = targets.reshape(-1) - width * (group.rank() if group else 0)
        elsewhere = (column < 0) | (column >= width)
        column = column.masked_fill(elsewhere, 0)
        predicted = rows.gather(-1, column.unsqueeze(-1)).squeeze(-1).float() - highest
        reduced(predicted.masked_fill_(elsewhere, 0), ReduceOp.SUM, group)
        total = torch.empty_like(highest)
        for part in chunks(rows):
            total[part] = shifted(rows[part], highest[part]).exp_().sum(-1)
        reduced(total, ReduceOp.SUM, group)
        ctx.save_for_backward(logits, highest, total, column, elsewhere)
        return (total.log() - predicted).view_as(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, highest, total, column, elsewhere = ctx.saved_tensors
        rows, of_rows, here = as_rows(logits), of_loss.reshape(-1, 1), (~elsewhere).float()
        gradient = torch.empty_like(rows)
        for part in chunks(rows):
            softmax = shifted(rows[part], highest[part]).exp_().div_(total[part].unsqueeze(-1))
            tokens = torch.arange(len(softmax), device=softmax.device)
            softmax[tokens, column[part]] -= here[part]
            gradient[part] = softmax.mul_(of_rows[part])
            del softmax  # before the next chunk is allocated
        return gradient.view_as(logits), None, None
