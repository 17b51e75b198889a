"""Times attention, fused and unfused, forward and backward, on the CPU; and its peak memory.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/attention.py [--threads 2] [--repeats 3]

Both take the same operands; the unfused one takes upstream's steps, with grouped keys repeated, a
buffer of scores, a mask and a softmax in fp32. They take turns, and the best of each counts:
machines are noisy, read the ratios. Memory is the peak of a process of its own for each, above what
the operands had taken; it needs Linux.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.attention import fused_attention
from torch import Tensor

LENGTHS = (1024, 2048)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Heads, groups and head dims of attention on one sequence."""

    heads: int
    groups: int
    width: int
    value_width: int


SHAPES = {"llama32-1b, a quarter": Shape(8, 2, 64, 64), "MLA, 4 heads": Shape(4, 4, 192, 128)}


def main() -> None:
    """Measure and print; with --memory, one case's peak alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", nargs=4, metavar=("PATH", "SHAPE", "DTYPE", "LENGTH"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        path, shape, dtype, length = arguments.memory
        print(json.dumps(peak(PATHS[path], SHAPES[shape], DTYPES[dtype], int(length))))
        return
    print(f"{arguments.threads} threads, torch {torch.__version__}\n")
    print("| shape | dtype | s | unfused ms | fused ms | time | unfused MB | fused MB | memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in ((s, d, n) for s in SHAPES for d in DTYPES for n in LENGTHS):
        print_row(*case, arguments)


def print_row(shape: str, dtype: str, length: int, arguments: argparse.Namespace) -> None:
    """One row of the table."""
    tensors = operands(SHAPES[shape], DTYPES[dtype], length)
    best = dict.fromkeys(PATHS, float("inf"))
    for _ in range(arguments.repeats):
        for path, attend in PATHS.items():
            best[path] = min(best[path], milliseconds(attend, tensors))
    megabytes = {path: measured(path, shape, dtype, length, arguments.threads) for path in PATHS}
    times = [f"{best[path]:.0f}" for path in PATHS]
    sizes = [f"{megabytes[path]:.0f}" for path in PATHS]
    cells = [shape, dtype, str(length), *times, f"{best['unfused'] / best['fused']:.1f}x", *sizes]
    cells.append(f"{megabytes['unfused'] / megabytes['fused']:.1f}x")
    print(f"| {' | '.join(cells)} |", flush=True)


def measured(path: str, shape: str, dtype: str, length: int, threads: int) -> float:
    """The peak of one case in MB, from a process of its own."""
    command = [sys.executable, __file__, "--threads", str(threads)]
    command += ["--memory", path, shape, dtype, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def peak(attend: Callable, shape: Shape, dtype: torch.dtype, length: int) -> float:
    """By how many MB one pass raises what this process holds, at its peak."""
    step(attend, operands(shape, dtype, 64))  # loads what is loaded once
    tensors = operands(shape, dtype, length)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = highest_kilobytes()
    step(attend, tensors)
    return (highest_kilobytes() - before) / 1024


def highest_kilobytes() -> int:
    """The most that this process has held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def milliseconds(attend: Callable, tensors: list[Tensor]) -> float:
    """One forward and backward pass."""
    start = time.perf_counter()
    step(attend, tensors)
    return 1000 * (time.perf_counter() - start)


def step(attend: Callable, tensors: list[Tensor]) -> None:
    """Forward and backward, the gradients dropped."""
    torch.autograd.grad(attend(*tensors).sum(), tensors)


def operands(shape: Shape, dtype: torch.dtype, length: int) -> list[Tensor]:
    """Query, key and value [s, 1, heads, width], with gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((shape.heads, shape.width), (shape.groups, shape.width))
    sizes += ((shape.groups, shape.value_width),)
    made = (torch.randn(length, 1, *size, generator=generator) for size in sizes)
    return [t.to(dtype).requires_grad_() for t in made]


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Ours."""
    return fused_attention(query, key, value, scale=query.size(-1) ** -0.5, causal=True)


def unfused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Upstream's steps."""
    groups = query.size(2) // key.size(2)
    q, k, v = (
        t.repeat_interleave(n, 2)[:, 0].transpose(0, 1)
        for t, n in ((query, 1), (key, groups), (value, groups))
    )
    length = q.size(1)
    buffer = q.new_empty(q.size(0), length, length)
    scores = torch.baddbmm(buffer, q, k.transpose(1, 2), beta=0.0, alpha=q.size(-1) ** -0.5)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    probs = scores.float().masked_fill(hidden, -10000.0).softmax(-1).to(q.dtype)
    return torch.bmm(probs, v).transpose(0, 1).flatten(1)


PATHS: dict[str, Callable] = {"unfused": unfused, "fused": fused}


if __name__ == "__main__":
    main()
