"""Compare the speed of the Triton quantizers on a CUDA device with that of a copy.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/quant_gpu.py

Prints a table for 8192 x 8192 bfloat16: the median time in microseconds, the bandwidth (bytes read
and written per second), and its share of the bandwidth of a copy. The target is 85 % along rows and
columns. Without a device, TRITON_INTERPRET=1 runs it in Triton's interpreter, where times mean
nothing. tests/mqo/quant/test_gpu.py compares the results with the reference.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator

import torch
from mqo.quant.formats import FORMATS
from mqo.quant.hadamard import transform
from mqo.quant.spec import Hadamard, QuantSpec
from timing import options
from torch import Tensor

TARGET = 0.85
STOCHASTIC = ("mxfp8", "nvfp4", "hif4")

Step = Callable[[], Tensor]


def main() -> None:
    """Measure and print; exit with 1 without a device, or if a kernel is slow."""
    parser = options(__doc__, size=8192)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    given = parser.parse_args()
    try:
        from mqo.quant import gpu
    except ImportError:
        gpu = None
    if gpu is None or not (torch.cuda.is_available() or gpu.INTERPRETED):
        sys.exit("No CUDA device or no Triton was found. `TRITON_INTERPRET=1` runs this on a CPU.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(given.size, given.size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    unit = bandwidth(lambda: out.copy_(x), x)
    print("| kernel | µs | TB/s | share of copy |\n|---|---|---|---|")
    row("copy", lambda: out.copy_(x), x, unit)
    slow = [
        name
        for name, step, bound in steps(gpu, x, out, given.formats)
        if row(name, step, x, unit) < bound
    ]
    if slow and torch.cuda.is_available():
        sys.exit(f"Slower than {TARGET:.0%} of a copy: {', '.join(slow)}")


def steps(
    gpu: object, x: Tensor, out: Tensor, formats: list[str]
) -> Iterator[tuple[str, Step, float]]:
    """Yield a name, a function to time, and the smallest allowed share of a copy's bandwidth."""
    amax = x.abs().max().float()
    for kind, (axis, name) in itertools.product(formats, ((-1, "rows"), (0, "columns"))):
        spec = QuantSpec(kind)
        if spec.block is None and axis == 0:
            continue
        yield f"{kind} {name}", lambda s=spec, a=axis: gpu.qdq(x, s, a, out, None, amax), TARGET
    for kind in set(STOCHASTIC) & set(formats):
        spec = QuantSpec(kind, rounding="stochastic")
        yield f"{kind} rows, stochastic", lambda s=spec: gpu.qdq(x, s, -1, out, 7), 0.0
    for points, (axis, name) in itertools.product((16, 128), ((-1, "rows"), (0, "columns"))):
        hadamard = Hadamard(points, "random")
        yield (
            f"hadamard-{points} {name}",
            lambda h=hadamard, a=axis: transform(x, h, axis=a, seed=7),
            0.0,
        )


def row(name: str, step: Step, x: Tensor, unit: float) -> float:
    """Print one row of the table, and return the share of a copy's bandwidth."""
    speed = bandwidth(step, x)
    print(
        f"| {name} | {2 * x.nbytes / speed * 1e6:.0f} | {speed / 1e12:.2f} | {speed / unit:.0%} |"
    )
    return speed / unit


def bandwidth(step: Step, x: Tensor) -> float:
    """Return bytes per second, read and written; allocations of a step are cached."""
    return 2 * x.nbytes / seconds(step)


def seconds(step: Callable[[], object]) -> float:
    """Return the median seconds of a step on a device, or the seconds of one run on a CPU."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return do_bench(step, warmup=50, rep=200, return_mode="median") / 1e3
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
