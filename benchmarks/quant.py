"""Times the quantizers on the CPU: a large matrix, and a linear layer's forward.

    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776  # as the launcher does
    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/quant.py \\
        [--threads 2] [--repeats 30] [--fast]

All paths of a table take turns in one run; the best of each counts. Machines are noisy: read the
ratios. torch.compile and torchao are timed where they run; neither is needed otherwise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from mqo.quant import config, reference
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS
from mqo.quant.hadamard import transform
from mqo.quant.operands import gemm_operands
from mqo.quant.spec import Hadamard, QuantSpec
from torch import Tensor

SIDE = 4096
TOKENS, INPUTS, OUTPUTS = 2048, 1024, 4096
LINEAR_REPEATS = 5
LINEAR_KINDS = ("none", "mxfp8", "mxfp4", "hifp8", "nvfp4", "hif4")
TORCHAO = {"mxfp8": "float8_e4m3fn", "mxfp8_e5m2": "float8_e5m2", "mxfp4": "float4_e2m1fn_x2"}
TRANSFORMED = ("nvfp4", "mxfp4")
SEED = 7
Job = Callable[[], object]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--fast", action="store_true", help="only what is compiled, and copy_")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{arguments.threads} threads, {processor()}, torch {torch.__version__}\n")
    print(f"{SIDE} x {SIDE}, best of {arguments.repeats}; of what is not compiled by us, of 3\n")
    print("| path | dtype | ms | of copy_ |\n|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        print_matrix(dtype, arguments.repeats, arguments.fast)
    print(f"\nA linear layer, {TOKENS} tokens, {INPUTS} -> {OUTPUTS}, best of {LINEAR_REPEATS}\n")
    print("| path | dtype | ms | of the plain one |\n|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        print_linear(dtype)


def print_matrix(dtype: torch.dtype, repeats: int, fast: bool) -> None:
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
    best = measure(jobs, repeats)
    best |= measure({"mxfp8, cpu, a new tensor": quantize(x, QuantSpec("mxfp8"), -1, None)}, 5)
    for kind in () if fast else FORMATS:
        best |= slow_paths(x, QuantSpec(kind))
    print_table(best, dtype)


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


def print_table(best: dict[str, float | str], dtype: torch.dtype) -> None:
    """Print rows for a dtype, with ratios to the first; a text stands for both numbers."""
    unit = next(iter(best.values()))
    name = str(dtype).removeprefix("torch.")
    for path, seconds in best.items():
        if not isinstance(seconds, str):
            seconds = f"{seconds * 1e3:.2f} | {seconds / unit:.2f}x"
        print(f"| {path} | {name} | {seconds} |", flush=True)


def slow_paths(x: Tensor, spec: QuantSpec) -> dict[str, float | str]:
    """Time what the compiled quantizers are compared with, best of three."""
    kind = spec.quant_type
    paths = {f"{kind}, reference": lambda: lambda: reference.qdq(x, spec)}
    paths[f"{kind}, torch.compile of the reference"] = lambda: compiled(x, spec)
    if kind in TORCHAO:
        paths[f"{kind}, torchao, eager"] = lambda: torchao(x, kind)
    return {name: attempt(make) for name, make in paths.items()}


def attempt(make: Callable[[], Job]) -> float | str:
    """Time what `make` returns, or say in a table's cells why it does not run."""
    try:
        job = make()
        job()
        return min(timed(job) for _ in range(3))
    except Exception as error:  # each of these libraries has errors of its own
        return f"{type(error).__name__} | does not run here"


def compiled(x: Tensor, spec: QuantSpec) -> Job:
    """Compile the reference; that takes a C++ compiler."""
    torch.compiler.reset()  # after a few specs dynamo would give up, and run it as it is
    function = torch.compile(lambda tensor: reference.qdq(tensor, spec), dynamic=False)
    return lambda: function(x)


def torchao(x: Tensor, kind: str) -> Job:
    """Quantize and dequantize with torchao's MX tensors."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    element = getattr(torch, TORCHAO[kind])
    return lambda: MXTensor.to_mx(x, element, 32).dequantize(x.dtype)


def print_linear(dtype: torch.dtype) -> None:
    """Print what a forward takes at the fprop site, whose weight is quantized once an epoch."""
    x = torch.randn(TOKENS, INPUTS).to(dtype)
    weight = torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS).to(dtype))
    jobs = {"plain" if kind == "none" else kind: forward(x, weight, kind) for kind in LINEAR_KINDS}
    with torch.no_grad(), weights_cached():
        print_table(measure(jobs, LINEAR_REPEATS), dtype)


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


def measure(jobs: dict[str, Job], repeats: int) -> dict[str, float]:
    """Time the jobs in turns; the best of each in seconds."""
    for job in jobs.values():
        job()
    rounds = [{name: timed(job) for name, job in jobs.items()} for _ in range(repeats)]
    return {name: min(times[name] for times in rounds) for name in jobs}


def timed(job: Job) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def processor() -> str:
    """Return what Linux calls the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    main()
