"""Times the quantizers on the CPU: a large matrix, and a linear layer's forward.

    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776  # as the launcher does
    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/quant.py \\
        [--threads 2] [--repeats 30]

All paths of a table take turns in one run; the best of each counts. Machines are noisy: read the
ratios.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from mqo.launch.machine import cpu_model
from mqo.quant import FORMATS, Hadamard, QuantSpec, config, fake_quantize, gemm_operands
from mqo.quant.hadamard import transform
from timing import Job, best
from torch import Tensor

SIDE = 4096
TOKENS, INPUTS, OUTPUTS = 2048, 1024, 4096
LINEAR_REPEATS = 5
LINEAR_KINDS = ("none", "mxfp8", "mxfp4", "hifp8", "nvfp4", "hif4")
TRANSFORMED = ("nvfp4", "mxfp4")
SEED = 7


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{arguments.threads} threads, {cpu_model()}, torch {torch.__version__}\n")
    print(f"{SIDE} x {SIDE}, best of {arguments.repeats}\n")
    print("| path | dtype | ms | of copy_ |\n|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        print_matrix(dtype, arguments.repeats)
    print(f"\nA linear layer, {TOKENS} tokens, {INPUTS} -> {OUTPUTS}, best of {LINEAR_REPEATS}\n")
    print("| path | dtype | ms | of the plain one |\n|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        print_linear(dtype)


def print_matrix(dtype: torch.dtype, repeats: int) -> None:
    """Print what each path takes for one large matrix."""
    x = torch.randn(SIDE, SIDE).to(dtype)
    out = torch.empty_like(x)
    jobs: dict[str, Job] = {"copy_, preallocated": lambda: out.copy_(x)}
    for kind in FORMATS:
        jobs |= {f"{kind}, {name}": quantize(x, *how, out) for name, how in ways(kind)}
    for name, axis in (("rows", -1), ("columns", 0)):
        jobs[f"hadamard-16, {name}"] = transformed(x, None, axis, out)
        for kind in TRANSFORMED:
            jobs[f"hadamard-16 + {kind}, {name}"] = transformed(x, QuantSpec(kind), axis, out)
    # Fresh memory has to be had from the system page by page; best in no other job's way.
    found = best(jobs, repeats)
    found |= best({"mxfp8, cpu, a new tensor": quantize(x, QuantSpec("mxfp8"), -1, None)}, 5)
    print_table(found, dtype)


def ways(kind: str) -> Iterator[tuple[str, tuple[QuantSpec, int]]]:
    """Yield the ways to quantize to a format: a name, and the spec and axis."""
    spec, drawn = QuantSpec(kind), QuantSpec(kind, rounding="stochastic")
    yield "rows" if spec.block else "elements", (spec, -1)
    if spec.block:
        yield "columns", (spec, 0)
    if spec.format.square:
        yield "squares", (QuantSpec(kind, tile="square"), -1)
    yield "stochastic", (drawn, -1)
    if spec.block:
        yield "stochastic, columns", (drawn, 0)


def print_table(found: dict[str, float], dtype: torch.dtype) -> None:
    """Print rows for a dtype, with ratios to the first."""
    unit = next(iter(found.values()))
    name = str(dtype).removeprefix("torch.")
    for path, seconds in found.items():
        print(f"| {path} | {name} | {seconds * 1e3:.2f} | {seconds / unit:.2f}x |", flush=True)


def print_linear(dtype: torch.dtype) -> None:
    """Print what a forward takes at the fprop site, whose weight is quantized once an epoch."""
    x = torch.randn(TOKENS, INPUTS).to(dtype)
    weight = torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS).to(dtype))
    jobs = {"plain" if kind == "none" else kind: forward(x, weight, kind) for kind in LINEAR_KINDS}
    with torch.no_grad(), weights_cached():
        print_table(best(jobs, LINEAR_REPEATS), dtype)


def forward(x: Tensor, weight: Tensor, quant_type: str) -> Job:
    """Return the forward as the patched linear layer has it."""

    def run() -> Tensor:
        operands = gemm_operands("fprop", quant_type, weight)
        return torch.matmul(operands.lhs(x), operands.rhs(weight).t())

    return run


@contextmanager
def weights_cached() -> Iterator[None]:
    """Give this process the options of a run with `--cache-weights`."""
    with tempfile.TemporaryDirectory() as folder:
        options = Path(folder) / "quant.toml"
        options.write_text("[quantizer]\ncache_weights = true\n", encoding="utf-8")
        os.environ[config.ENVIRONMENT_VARIABLE] = str(options)
        config.reset()
        yield
        del os.environ[config.ENVIRONMENT_VARIABLE]
        config.reset()


def quantize(x: Tensor, spec: QuantSpec, axis: int, out: Tensor | None) -> Job:
    """Return the call that users make."""
    return lambda: fake_quantize(x, spec, axis=axis, out=out, seed=SEED)


def transformed(x: Tensor, spec: QuantSpec | None, axis: int, out: Tensor) -> Job:
    """Return the Hadamard transform of 16 points, and rounding what it gives in place."""
    amax = torch.zeros(())

    def run() -> None:
        transform(x, Hadamard(16), axis=axis, out=out, amax=amax)
        if spec is not None:
            fake_quantize(out, spec, axis=axis, out=out, amax=amax)

    return run


if __name__ == "__main__":
    main()
