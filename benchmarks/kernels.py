"""Compile the quantizers' GPU kernels ahead of time, and estimate their speed.

    PYTHONPATH=Megatron-LM:.cache/triton .venv/bin/python benchmarks/kernels.py > TABLE.md

Needs no GPU. Writes benchmarks/results/kernels.csv: registers and spills per thread, and
instructions per element, on sm_90 and sm_100, for a tensor of 8192 x 8192. A test checks that no
kernel exceeds it. Prints the same table with an estimate: the share of a GPU's memory bandwidth
that each kernel can reach.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from ahead import ARCHITECTURES, Code, compiled, read
from mqo.quant import gpu
from mqo.quant.formats import FORMATS
from mqo.quant.gpu import hadamard
from mqo.quant.gpu.tiles import TilePlan, plan_tiles
from mqo.quant.spec import Hadamard, QuantSpec
from mqo.scale.devices import device

TABLE = Path(__file__).with_name("results") / "kernels.csv"
COLUMNS = ("kernel", "architecture", "instructions", "registers", "spills")
SIZE = 8192
AXES = {"rows": -1, "columns": 0}
MAIN = ("mxfp8", "nvfp4", "hif4")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Per multiprocessor: lanes that it issues to per clock, warps and registers that it holds.
LANES, WARPS, REGISTERS = 128, 64, 65536
# {device: (architecture, dense bf16 FLOPs per clock of a multiprocessor's tensor cores,
# multiprocessors)}; the peak rate in devices.toml then gives the clock. From NVIDIA's white papers
# on the Hopper and Blackwell architectures.
DEVICES = {
    "h100-80gb": ("sm_90", 4096, 132),
    "h200": ("sm_90", 4096, 132),
    "b200": ("sm_100", 8192, 148),
}
# Seconds from the issue of a load to its data, on a busy GPU; an assumption.
LATENCY = 8e-7


@dataclass(frozen=True)
class Case:
    """A kernel on a tensor: its launch, and the tiles that the launch uses."""

    name: str
    module: object
    launch: Callable[[], object]
    plan: TilePlan
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Return the number of elements per thread."""
        return self.plan.tile.rows * self.plan.tile.columns // (self.plan.warps * 32)

    def compiled(self, architecture: str) -> Code:
        """Return its machine code."""
        return read(compiled(self.module, ["_kernel"], self.launch, architecture)[0])

    def row(self, architecture: str) -> dict[str, object]:
        """Return its row of the table."""
        code = self.compiled(architecture)
        instructions = round(len(code.instructions) / self.elements, 1)
        values = (self.name, architecture, instructions, code.registers, code.spills)
        return dict(zip(COLUMNS, values, strict=True))


def cases() -> Iterator[Case]:
    """Yield all kernels in the table."""
    for axis in AXES:
        for kind in FORMATS:
            yield of_format(kind, axis)
        for kind in MAIN:
            yield of_format(kind, axis, rounding="stochastic")
    for kind in ("nvfp4", "fp8_block"):
        yield of_format(kind, "rows", tile="square")
    for dtype in ("fp16", "fp32"):
        for kind in MAIN:
            yield of_format(kind, "rows", dtype)
    for points in (16, 128):
        for axis in AXES:
            yield of_hadamard(points, axis)


def of_format(kind: str, axis: str, dtype: str = "bf16", **choices: str) -> Case:
    """Return the quantizer of a format; `choices` are fields of its QuantSpec."""
    x, spec = _tensor(dtype), QuantSpec(kind, **choices)
    steps = gpu.steps_of(spec)
    axis_and_run = (AXES[axis], spec.block) if spec.block else (None, steps.run)
    plan = plan_tiles(x.shape, x.stride(), x.stride(), *axis_and_run, steps.side)
    name = " ".join((kind, axis, dtype, *choices.values()))
    return Case(name, gpu, lambda: gpu._launch(x, x, spec, AXES[axis], 7, None), plan, x.dtype)


def of_hadamard(points: int, axis: str) -> Case:
    """Return the Hadamard transform of `points` points."""
    x, transform = _tensor("bf16"), Hadamard(points, "random")
    plan = plan_tiles(x.shape, x.stride(), x.stride(), AXES[axis], points, 1)
    name = f"hadamard-{points} {axis} bf16"
    launch = partial(hadamard._launch, x, x, transform, AXES[axis], 7)
    return Case(name, hadamard, launch, plan, x.dtype)


def _tensor(dtype: str) -> torch.Tensor:
    return torch.empty(SIZE, SIZE, dtype=DTYPES[dtype], device="meta")


def share(case: Case, row: dict[str, object], name: str) -> float:
    """Return the largest share of a device's memory bandwidth that a kernel can reach.

    The minimum of 1 and two bounds: the rate at which instructions are issued, and the loads in
    flight with the warps that fit by registers. Each element is read and written once.
    """
    _, flops_per_clock, processors = DEVICES[name]
    gpu_device = device(name)
    clock = gpu_device.bf16_tflops * 1e12 / (flops_per_clock * processors)
    width, bandwidth = case.dtype.itemsize, gpu_device.memory_gbs * 1e9
    elements = bandwidth / (2 * width)  # per second
    issued = LANES * processors * clock / float(row["instructions"])
    # Registers are allocated to a warp in units of 8 per thread.
    warps = min(WARPS, REGISTERS // (32 * -(-int(row["registers"]) // 8) * 8))
    in_flight = warps * 32 * case.elements * width * processors
    return min(1.0, issued / elements, in_flight / LATENCY / (bandwidth / 2))


def main() -> None:
    """Compile all kernels, write the table, and print it with the estimates."""
    rows = []
    print(f"| kernel | | instructions | registers | spills | {' | '.join(DEVICES)} |")
    print("|" + "---|" * (5 + len(DEVICES)))
    for case in cases():
        for architecture in ARCHITECTURES:
            print(case.name, architecture, file=sys.stderr)
            row = case.row(architecture)
            rows.append(row)
            shares = [
                f"{share(case, row, name):.0%}" if target == architecture else ""
                for name, (target, *_) in DEVICES.items()
            ]
            print(f"| {' | '.join(map(str, [*row.values(), *shares]))} |", flush=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
