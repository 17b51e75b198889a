"""Measure time and peak memory of losses over a vocabulary, forward and backward, on the CPU.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/losses.py [--threads 1] [--repeats 3]

Compares mqo.megatron.losses with upstream's cross-entropy, and with torch's divergence on full fp32
tensors. The losses take turns, and the minimum time of each is printed: CPU time of the
process, summed over threads. Memory is the peak of a separate process, in units of one tensor of
logits, including the loss's inputs; this needs Linux.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from megatron.core.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy
from mqo.megatron.losses import chunked_cross_entropy, chunked_kl
from timing import best, in_own_process, options, raised_bytes
from torch import Tensor
from torch.nn.functional import kl_div

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CASES = {
    "cross-entropy": ("upstream's", "chunked"),
    "divergence": ("whole tensors", "chunked divergence"),
}


def main() -> None:
    """Print the table; with --memory, only the peak of one case."""
    parser = options(__doc__, threads=1, repeats=3, tokens=2048, vocabulary=32768)
    parser.add_argument("--memory", nargs=2, metavar=("LOSS", "DTYPE"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if arguments.memory:
        loss, dtype = arguments.memory
        print(peak(LOSSES[loss], DTYPES[dtype], arguments))
        return
    print(f"{arguments.tokens:,} x {arguments.vocabulary:,}, {arguments.threads} threads\n")
    print("| loss | dtype | before s | chunked s | time | before, tensors | chunked, tensors |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        for dtype in DTYPES:
            print_row(case, dtype, arguments)


def print_row(case: str, dtype: str, arguments: argparse.Namespace) -> None:
    """Print one row of the table."""
    tensors = operands(DTYPES[dtype], arguments)
    workloads = {loss: partial(step, LOSSES[loss], tensors) for loss in CASES[case]}
    before, after = best(workloads, arguments.repeats, time.process_time).values()
    same = ("--threads", arguments.threads, "--tokens", arguments.tokens)
    same += ("--vocabulary", arguments.vocabulary, "--memory")
    sizes = [f"{in_own_process(__file__, *same, loss, dtype):.2f}" for loss in workloads]
    cells = [case, dtype, f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}x", *sizes]
    print(f"| {' | '.join(cells)} |", flush=True)


def peak(loss: Callable, dtype: torch.dtype, arguments: argparse.Namespace) -> float:
    """Return the peak memory in tensors of logits, including the inputs."""
    small = argparse.Namespace(tokens=64, vocabulary=512)
    step(loss, operands(dtype, small))  # warm up: load libraries and kernels first
    tensors = operands(dtype, arguments)
    given = 1 if loss in (upstreams, chunked) else 2
    return given + raised_bytes(lambda: step(loss, tensors)) / tensors[0].nbytes


def step(loss: Callable, tensors: list[Tensor]) -> None:
    """Run forward and backward; discard the gradient."""
    torch.autograd.grad(loss(*tensors).sum(), tensors[0])


def operands(dtype: torch.dtype, arguments: argparse.Namespace) -> list[Tensor]:
    """Return a student's and a teacher's logits [tokens, 1, vocabulary], and targets."""
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.tokens, 1, arguments.vocabulary)
    student, teacher = (torch.empty(shape, dtype=dtype) for _ in range(2))
    for row in range(arguments.tokens):  # row by row: a full fp32 copy would be the peak
        for logits in (student, teacher):
            logits[row] = 4 * torch.randn(shape[1:], generator=generator)
    targets = torch.randint(arguments.vocabulary, shape[:2], generator=generator)
    return [student.requires_grad_(), teacher, targets]


def upstreams(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Compute upstream's cross-entropy, which overwrites fp32 logits: a leaf needs a copy."""
    given = student * 1 if student.dtype == torch.float32 else student
    return _VocabParallelCrossEntropy.apply(given, targets, 0.0, torch.distributed.group.WORLD)


def chunked(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Compute our cross-entropy."""
    return chunked_cross_entropy(student, targets, torch.distributed.group.WORLD)


def whole(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Compute torch's divergence on full fp32 tensors."""
    ours, theirs = (logits.float().log_softmax(-1) for logits in (student, teacher))
    return kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def chunked_divergence(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Compute our divergence, whose gradient overwrites the teacher's logits."""
    return chunked_kl(student, teacher, overwrite_teacher=True)


LOSSES: dict[str, Callable] = {
    "upstream's": upstreams,
    "chunked": chunked,
    "whole tensors": whole,
    "chunked divergence": chunked_divergence,
}


if __name__ == "__main__":
    main()
