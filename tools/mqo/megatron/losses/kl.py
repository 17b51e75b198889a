"""Compute the divergence of a student from a teacher over a vocabulary that ranks may share."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp

from mqo.megatron.losses.chunks import as_rows, chunks, reduced, shifted


def chunked_kl(
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    overwrite_teacher: bool = False,
) -> Tensor:
    """Return KL(teacher || student) of softmax(logits / temperature), in nats and fp32, [...].

    All arithmetic is in fp32. Ranks of `group` exchange maxima and sums of tokens, never logits.

    With `overwrite_teacher` the backward pass writes the student's gradient over the teacher's
    logits. The peak memory is then two tensors of the size and dtype of the logits, plus three
    chunks in fp32; otherwise it is three tensors, including the gradient. `student` is never
    written to. The memory is reused only if it is contiguous and has the student's dtype.

    Args:
        student: [..., v]; v is this rank's part of the vocabulary.
        teacher: [..., v]; it gets no gradient.
        temperature: divisor of both; the result is not multiplied by temperature².
        group: the ranks that share the vocabulary; None if one rank holds all of it.
        overwrite_teacher: set it only if nothing reads `teacher` after the backward pass begins.
    """
    return _KL.apply(student, teacher, temperature, group, overwrite_teacher)


class _KL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        temperature: float,
        group: ProcessGroup | None,
        overwrite_teacher: bool,
    ) -> Tensor:
        pair = as_rows(student), as_rows(teacher)
        # Division by a positive number keeps the order, so this is also the maximum afterwards.
        highest = torch.stack([rows.amax(-1).float() / temperature for rows in pair])
        reduced(highest, ReduceOp.MAX, group)
        norm = torch.empty_like(highest)
        for part in chunks(pair[0]):
            for rows, top, total in zip(pair, highest, norm, strict=True):
                total[part] = shifted(rows[part], top[part], temperature).exp_().sum(-1)
        norm = reduced(norm, ReduceOp.SUM, group).log_()
        loss = torch.empty_like(norm[0])
        for part in chunks(pair[0]):
            ours, theirs = _log_softmax(pair, part, highest, norm, temperature)
            expected = theirs.exp()
            loss[part] = theirs.sub_(ours).mul_(expected).sum(-1)
            del ours, theirs, expected  # before the next chunk is made
        ctx.save_for_backward(student, teacher, highest, norm)
        ctx.temperature, ctx.overwrite_teacher = temperature, overwrite_teacher
        return reduced(loss, ReduceOp.SUM, group).view(student.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        student, teacher, highest, norm = ctx.saved_tensors
        pair, of_rows = (as_rows(student), as_rows(teacher)), of_loss.reshape(-1, 1)
        can_hold = ctx.overwrite_teacher and _can_hold_gradient(teacher, student)
        gradient = pair[1] if can_hold else torch.empty_like(pair[0])
        for part in chunks(pair[0]):
            ours, theirs = _log_softmax(pair, part, highest, norm, ctx.temperature)
            difference = ours.exp_().sub_(theirs.exp_()).mul_(of_rows[part])
            if ctx.temperature != 1:
                difference.div_(ctx.temperature)
            gradient[part] = difference
            del ours, theirs, difference  # before the next chunk is made
        return gradient.view_as(student), None, None, None, None


def _log_softmax(
    pair: tuple[Tensor, Tensor], part: slice, highest: Tensor, norm: Tensor, temperature: float
) -> list[Tensor]:
    """Return the log-probabilities of a chunk, the student's and the teacher's, in fp32.

    `highest` and `norm` are [2, tokens]: the maxima, and the logarithms of the sums.
    """
    return [
        shifted(rows[part], top[part], temperature).sub_(total[part].unsqueeze(-1))
        for rows, top, total in zip(pair, highest, norm, strict=True)
    ]


def _can_hold_gradient(teacher: Tensor, student: Tensor) -> bool:
    """Return whether the teacher's memory can hold the gradient, and is not the student's."""
    apart = teacher.untyped_storage().data_ptr() != student.untyped_storage().data_ptr()
    return apart and teacher.dtype == student.dtype and teacher.is_contiguous()
