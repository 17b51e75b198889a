"""Measure time and peak memory of attention with and without quant types, on the CPU.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/attention.py [--threads 2] [--repeats 3]
        [--lengths 1024 2048 4096 8192] [--quant-type mxfp8] [--cpu-time]

Each path runs forward and backward on the same operands. "fused" has no types. "QK" quantizes
queries and keys and uses torch's fused kernel. "chunks" has no types, and runs in chunks. "QK, PV"
also runs in chunks, and "all seven" has types in the backward pass's products, too. "unfused" has
both types in upstream's steps: repeated keys of groups, a buffer of scores, a mask and a softmax.
The paths take turns, and the minimum time of each is printed. Machines are noisy: read the ratios
to "unfused". --cpu-time counts the time of this process's threads, which the load of a shared
machine changes less. Memory is the peak of a separate process above the operands; this needs Linux.
"unfused" is skipped if the machine lacks the memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from mqo.megatron.attention.backward import BackwardOperands
from mqo.megatron.attention.paths import chunked_context, fused_context
from mqo.quant import gemm_operands
from mqo.quant.formats import ATTENTION_BACKWARD
from timing import Clock, best, in_own_process, options, raised_bytes
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Tensors of [s, s] that the unfused path holds at once; share of memory that they may take.
UNFUSED_TENSORS, UNFUSED_SHARE = 8, 0.6


@dataclass(frozen=True)
class Shape:
    """Heads, groups and head dims of attention on one sequence."""

    heads: int
    groups: int
    width: int
    value_width: int


SHAPES = {"llama32-1b, a quarter": Shape(8, 2, 64, 64), "MLA, 4 heads": Shape(4, 4, 192, 128)}


def main() -> None:
    """Print both tables; with --memory, only the peak of one case."""
    parser = options(__doc__, threads=2, repeats=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--quant-type", default="mxfp8")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--memory", nargs=4, metavar=("PATH", "SHAPE", "DTYPE", "LENGTH"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    paths = paths_of(arguments.quant_type)
    if arguments.memory:
        path, shape, dtype, length = arguments.memory
        print(peak(paths[path], SHAPES[shape], DTYPES[dtype], int(length)))
        return
    print(f"{arguments.quant_type}, {arguments.threads} threads, torch {torch.__version__}\n")
    print(f"| shape | dtype | s | {' | '.join(f'{p} ms' for p in paths)} | QK, PV / unfused |")
    print(f"|{'---|' * (4 + len(paths))}")
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    cases = [(s, d, n) for s in SHAPES for d in DTYPES for n in arguments.lengths]
    for case in cases:
        print_row(*case, times(paths, *case, arguments.repeats, clock))
    print(f"\n| shape | dtype | s | {' | '.join(f'{p} MiB' for p in paths)} | QK, PV / unfused |")
    print(f"|{'---|' * (4 + len(paths))}")
    same = ("--threads", arguments.threads, "--quant-type", arguments.quant_type, "--memory")
    for case in cases:
        peaks = {p: in_own_process(__file__, *same, p, *case) for p in fitting(paths, *case)}
        print_row(*case, peaks)


def print_row(shape: str, dtype: str, length: int, values: dict[str, float]) -> None:
    """Print a row, with a dash for a path that was skipped."""
    cells = [f"{values[path]:.0f}" if path in values else "-" for path in PATHS]
    ratio = values["QK, PV"] / values["unfused"] if "unfused" in values else None
    cells = [shape, dtype, str(length), *cells, "-" if ratio is None else f"{ratio:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def fitting(paths: dict[str, Callable], shape: str, dtype: str, length: int) -> dict[str, Callable]:
    """Return the paths that fit in this machine's memory."""
    scores = SHAPES[shape].heads * length**2 * DTYPES[dtype].itemsize
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * UNFUSED_SHARE
    return {p: f for p, f in paths.items() if p != "unfused" or UNFUSED_TENSORS * scores < room}


def times(
    paths: dict[str, Callable], shape: str, dtype: str, length: int, repeats: int, clock: Clock
) -> dict[str, float]:
    """Return the minimum time of each path, in milliseconds; the paths take turns."""
    tensors = operands(SHAPES[shape], DTYPES[dtype], length)
    fit = fitting(paths, shape, dtype, length)
    best_s = best(
        {path: partial(step, attend, tensors) for path, attend in fit.items()}, repeats, clock
    )
    return {path: 1000 * seconds for path, seconds in best_s.items()}


def peak(attend: Callable, shape: Shape, dtype: torch.dtype, length: int) -> float:
    """Return by how many MiB one pass raises the peak of this process."""
    step(attend, operands(shape, dtype, 64))  # warm up: load libraries and kernels first
    tensors = operands(shape, dtype, length)
    return raised_bytes(lambda: step(attend, tensors)) / 2**20


def step(attend: Callable, tensors: list[Tensor]) -> None:
    """Run forward and backward; discard the gradients."""
    torch.autograd.grad(attend(*tensors).sum(), tensors)


def operands(shape: Shape, dtype: torch.dtype, length: int) -> list[Tensor]:
    """Draw query, key and value [s, 1, heads, width], with gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((shape.heads, shape.width), (shape.groups, shape.width))
    sizes += ((shape.groups, shape.value_width),)
    drawn = (torch.randn(length, 1, *size, generator=generator) for size in sizes)
    return [t.to(dtype).requires_grad_() for t in drawn]


def layer_of(query: Tensor) -> SimpleNamespace:
    """Return the attributes of a DotProductAttention that the paths read, for the query's dtype."""
    softmax = {"scale": None, "input_in_float16": query.dtype != torch.float32}
    return SimpleNamespace(
        softmax_scale=query.size(-1) ** -0.5,
        scale_mask_softmax=SimpleNamespace(softmax_in_fp32=False, **softmax),
        attention_dropout=torch.nn.Dropout(0.0),
        config=SimpleNamespace(sequence_parallel=False),
    )


def fused(types: tuple[str, str], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention with torch's fused kernel."""
    layer = layer_of(query)
    qk = gemm_operands("qk", types[0], layer)
    return fused_context(layer, types[1], (), qk, query, key, value, None)


def chunked(types: tuple[str, str, str], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention in chunks; the last type is that of the backward pass's products."""
    layer = layer_of(query)
    qk = gemm_operands("qk", types[0], layer)
    sites = {site: gemm_operands(site, types[2], layer) for site in ATTENTION_BACKWARD}
    backward = BackwardOperands(**sites)
    return chunked_context(layer, types[1], (), None, qk, query, key, value, None, backward)


def unfused(types: tuple[str, str], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention in upstream's unfused steps."""
    layer, groups = layer_of(query), query.size(2) // key.size(2)
    qk, pv = (gemm_operands(s, kind, layer) for s, kind in zip(("qk", "pv"), types, strict=True))
    q, k, v = (
        t.repeat_interleave(n, 2)[:, 0] for t, n in ((query, 1), (key, groups), (value, groups))
    )
    length = q.size(0)
    scores = qk.product(torch.baddbmm)(
        q.new_empty(q.size(1), length, length),
        qk.lhs(q).transpose(0, 1),
        qk.rhs(k).transpose(0, 1).transpose(1, 2),
        beta=0.0,
        alpha=layer.softmax_scale,
    )
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    probs = scores.masked_fill_(hidden, -10000.0).softmax(-1)
    context = pv.product(torch.bmm)(pv.lhs(probs), pv.rhs(v).transpose(0, 1))
    return context.transpose(0, 1).flatten(1)


PATHS = ("fused", "QK", "chunks", "QK, PV", "all seven", "unfused")


def paths_of(quant_type: str) -> dict[str, Callable]:
    """Return the paths in PATHS as functions of query, key and value."""
    both = (quant_type, quant_type)
    ways: tuple[tuple[Callable[..., Tensor], tuple[str, ...]], ...] = (
        (fused, ("none", "none")),
        (fused, (quant_type, "none")),
        (chunked, ("none", "none", "none")),
        (chunked, (*both, "none")),
        (chunked, (*both, quant_type)),
        (unfused, both),
    )
    return {name: partial(way, types) for name, (way, types) in zip(PATHS, ways, strict=True)}


if __name__ == "__main__":
    main()
