"""Times the Triton quantizers on a CUDA device, beside a plain copy of the same tensor.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/quant_gpu.py

Prints a table for 8192 x 8192 bfloat16: the median in microseconds, the bytes read and written by
that time, and the share of the copy's bandwidth, which is to be at least 85 %. Before that, every
result is compared with the reference's, and once more when replayed as a CUDA graph.

All numbers are still to be taken: this was written where there is no GPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from megatron.quant import FORMATS, QuantSpec, reference
from torch import Tensor

SIZE = 8192
TARGET = 0.85
KINDS = tuple(FORMATS)
STILL_TO_BE_TAKEN = """\
There is no CUDA device (or no Triton) here. Still to be taken on one, for 8192 x 8192 bfloat16:
- the share of a device copy's bandwidth of mxfp8, mxfp8_e5m2, mxfp4 and hifp8, along rows and
  along columns (at least 85 %), and with stochastic rounding and a tensor scale (no target);
- that a CUDA graph replays each bit for bit."""

Step = Callable[[], Tensor]


def main() -> None:
    """Check, measure and print; exit 1 without a device, or if anything is wrong or slow."""
    try:
        from megatron.quant import gpu
    except ImportError:
        gpu = None
    if gpu is None or gpu.INTERPRETED or not torch.cuda.is_available():
        sys.exit(STILL_TO_BE_TAKEN)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    x = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    check(gpu)
    out = torch.empty_like(x)
    unit = bandwidth(lambda: out.copy_(x), 2)
    print("| what | µs | TB/s | of a copy |\n|---|---|---|---|")
    row("copy", lambda: out.copy_(x), 2, unit)
    slow = [
        name
        for name, step, tensors, bound in steps(gpu, x, out)
        if row(name, step, tensors, unit) < bound
    ]
    if slow:
        sys.exit(f"below {TARGET:.0%} of a copy: {', '.join(slow)}")


def steps(gpu: object, x: Tensor, out: Tensor) -> Iterator[tuple[str, Step, int, float]]:
    """Yield name, what to time, how many tensors it reads and writes, and the least share."""
    for kind, axis in itertools.product(KINDS, (-1, 0)):
        spec = QuantSpec(kind)
        if spec.block is None and axis == 0:
            continue
        yield f"{kind}, axis {axis}", lambda s=spec, a=axis: gpu.qdq(x, s, a, out), 2, TARGET
    for kind in KINDS:
        spec = QuantSpec(kind, rounding="stochastic")
        yield f"{kind}, stochastic", lambda s=spec: gpu.qdq(x, s, -1, out, 7), 2, 0.0
    spec = QuantSpec("hifp8", tensor_scale=True)
    yield "hifp8, tensor scale", lambda s=spec: gpu.qdq(x, s, -1, out), 3, 0.0


def row(name: str, step: Step, tensors: int, unit: float) -> float:
    """Print one line of the table, and return the share of a copy's bandwidth."""
    speed = bandwidth(step, tensors)
    moved = tensors * SIZE * SIZE * 2
    print(f"| {name} | {moved / speed * 1e6:.0f} | {speed / 1e12:.2f} | {speed / unit:.0%} |")
    return speed / unit


def bandwidth(step: Step, tensors: int) -> float:
    """Return bytes a second; what a step allocates comes from the allocator's cache."""
    from triton.testing import do_bench

    milliseconds = do_bench(step, warmup=100, rep=500, return_mode="median")
    return tensors * SIZE * SIZE * 2 / milliseconds * 1e3


def check(gpu: object) -> None:
    """Compare every kind with the reference, eagerly and replayed as a graph on other contents."""
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    for kind in KINDS:
        spec = QuantSpec(kind)
        compare(gpu.qdq(x, spec), x, spec)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = gpu.qdq(x, spec)
        x.mul_(3).add_(1)
        graph.replay()
        compare(result, x, spec)
    print("eager and replayed results are the reference's, bit for bit")


def compare(result: Tensor, x: Tensor, spec: QuantSpec) -> None:
    """Exit unless the result is what the reference makes of `x`."""
    if not result.view(torch.int16).equal(reference.qdq(x, spec).view(torch.int16)):
        sys.exit(f"{spec} is not what the reference gives")


if __name__ == "__main__":
    main()
