"""Time the quantizers on the CPU: on a matrix of 4096 x 4096, and in a linear layer's forward pass.

    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776  # as the launcher does
    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/quant.py \\
        [--threads 2] [--repeats 30]

All paths of a table take turns, and the minimum time of each is printed. Machines are noisy: read
the ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from mqo.launch.machine import cpu_model
from mqo.quant import (
    FORMATS,
    Hadamard,
    QuantSpec,
    config,
    fake_quantize,
    gemm_operands,
    load_quantizers,
)
from mqo.quant.hadamard import transform
from mqo.quant.quant_config import QuantConfig
from timing import Workload, best, options
from torch import Tensor

SIDE, OWN_SIDE = 4096, 1024
EXAMPLES = Path(__file__).parents[1] / "tools/mqo/quant/recipes"
TOKENS, INPUTS, OUTPUTS = 2048, 1024, 4096
LINEAR_REPEATS = 5
LINEAR_KINDS = ("none", "mxfp8", "mxfp4", "hifp8", "nvfp4", "hif4")
TRANSFORMED = ("nvfp4", "mxfp4")
SEED = 7


def main() -> None:
    """Measure, and print both tables."""
    arguments = options(__doc__, threads=2, repeats=30).parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{arguments.threads} threads, {cpu_model()}, torch {torch.__version__}\n")
    print(f"{SIDE} x {SIDE}, best of {arguments.repeats}\n")
    print("| path | dtype | ms | ratio to copy_ |\n|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        print_matrix(dtype, arguments.repeats)
    print(f"\nA linear layer, {TOKENS} tokens, {INPUTS} -> {OUTPUTS}, best of {LINEAR_REPEATS}\n")
    print("| path | dtype | ms | ratio to plain |\n|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        print_linear(dtype)
    print(f"\nCustom quantizers, {OWN_SIDE} x {OWN_SIDE}, best of {arguments.repeats}\n")
    print("| path | dtype | ms | ratio to nvfp4 |\n|---|---|---|---|")
    print_own(arguments.repeats)


def print_matrix(dtype: torch.dtype, repeats: int) -> None:
    """Print the time of each path for the matrix."""
    x = torch.randn(SIDE, SIDE).to(dtype)
    out = torch.empty_like(x)
    workloads: dict[str, Workload] = {"copy_, preallocated": lambda: out.copy_(x)}
    for kind in FORMATS:
        workloads |= {f"{kind}, {name}": quantize(x, *args, out) for name, args in ways(kind)}
    for name, axis in (("rows", -1), ("columns", 0)):
        workloads[f"hadamard-16, {name}"] = transformed(x, None, axis, out)
        for kind in TRANSFORMED:
            workloads[f"hadamard-16 + {kind}, {name}"] = transformed(x, QuantSpec(kind), axis, out)
    # New memory costs a page fault per page; timed last, so that it disturbs no other workload.
    best_s = best(workloads, repeats)
    best_s |= best({"mxfp8, cpu, a new tensor": quantize(x, QuantSpec("mxfp8"), -1, None)}, 5)
    print_table(best_s, dtype)


def print_own(repeats: int) -> None:
    """Print the time of the quantizers in Python of recipes, compared with nvfp4."""
    x = torch.randn(OWN_SIDE, OWN_SIDE)
    names = [name for file in sorted(EXAMPLES.glob("*.py")) for name in load_quantizers(file)]
    workloads = {name: quantize(x, QuantSpec(name), -1, None) for name in ("nvfp4", *names)}
    print_table(best(workloads, repeats), x.dtype)


def ways(kind: str) -> Iterator[tuple[str, tuple[QuantSpec, int]]]:
    """Yield the ways to quantize to a format: a name, and its spec and axis."""
    spec, drawn = QuantSpec(kind), QuantSpec(kind, rounding="stochastic")
    yield "rows" if spec.block else "elements", (spec, -1)
    if spec.block:
        yield "columns", (spec, 0)
    if spec.format.square:
        yield "squares", (QuantSpec(kind, tile="square"), -1)
    for rule in spec.format.scale_rules[1:] if spec.format.scale == "two-level" else ():
        for name, axis in (("rows", -1), ("columns", 0)):
            yield f"{rule}, {name}", (QuantSpec(kind, scale_rule=rule), axis)
    yield "stochastic", (drawn, -1)
    if spec.block:
        yield "stochastic, columns", (drawn, 0)


def print_table(best_s: dict[str, float], dtype: torch.dtype) -> None:
    """Print a row per path: its seconds, and the ratio to the first path."""
    unit = next(iter(best_s.values()))
    name = str(dtype).removeprefix("torch.")
    for path, seconds in best_s.items():
        print(f"| {path} | {name} | {seconds * 1e3:.2f} | {seconds / unit:.2f}x |", flush=True)


def print_linear(dtype: torch.dtype) -> None:
    """Print the time of fprop, whose weight is quantized once per weight epoch."""
    x = torch.randn(TOKENS, INPUTS).to(dtype)
    weight = torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS).to(dtype))
    names = {kind: "plain" if kind == "none" else kind for kind in LINEAR_KINDS}
    workloads = {name: forward(x, weight, kind) for kind, name in names.items()}
    with torch.no_grad(), config.using(QuantConfig(cache_weights=True)):
        print_table(best(workloads, LINEAR_REPEATS), dtype)


def forward(x: Tensor, weight: Tensor, quant_type: str) -> Workload:
    """Return a function that runs the forward GEMM of the patched linear layer."""

    def run() -> Tensor:
        operands = gemm_operands("fprop", quant_type, weight)
        return operands.product(torch.matmul)(operands.lhs(x), operands.rhs(weight).t())

    return run


def quantize(x: Tensor, spec: QuantSpec, axis: int, out: Tensor | None) -> Workload:
    """Return a function that calls the public `fake_quantize`."""
    return lambda: fake_quantize(x, spec, axis=axis, out=out, seed=SEED)


def transformed(x: Tensor, spec: QuantSpec | None, axis: int, out: Tensor) -> Workload:
    """Return a function that transforms 16 points by Hadamard and quantizes the result in place."""
    amax = torch.zeros(())

    def run() -> None:
        transform(x, Hadamard(16), axis=axis, out=out, amax=amax)
        if spec is not None:
            fake_quantize(out, spec, axis=axis, out=out, amax=amax)

    return run


if __name__ == "__main__":
    main()
