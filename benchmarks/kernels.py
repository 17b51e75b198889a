"""Compiles the quantizers' GPU kernels ahead of time, and estimates what bounds them.

    PYTHONPATH=Megatron-LM:.cache/triton .venv/bin/python benchmarks/kernels.py > TABLE.md

Writes benchmarks/results/kernels.csv, which a test holds the kernels to: registers, spills and
instructions an element, for sm_90 and sm_100, of a tensor of 8192 x 8192. On stdout: that, and the
share of a GPU's memory bandwidth that each kernel can reach, an estimate. Needs no GPU.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
# Of a multiprocessor: lanes that it can issue to in a clock, warps and registers that it holds.
LANES, WARPS, REGISTERS = 128, 64, 65536
# {device: (architecture, FLOPs that a multiprocessor's tensor cores do in a clock in bf16, dense,
# multiprocessors)}. With the peak rate of devices.toml this says the clock. From NVIDIA's white
# papers of the Hopper and Blackwell architectures.
DEVICES = {
    "h100-80gb": ("sm_90", 4096, 132),
    "h200": ("sm_90", 4096, 132),
    "b200": ("sm_100", 8192, 148),
}
# Seconds from a load's issue to its data, under load; an allowance.
LATENCY = 8e-7


@dataclass(frozen=True)
class Case:
    """A kernel on a tensor: how it is launched, and the tiles it then takes."""

    name: str
    module: object
    launch: Callable[[], object]
    plan: TilePlan
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Return the elements that a thread has."""
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
    """Yield all kernels of the table."""
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
    """Return the quantizer of a format; `choices` are fields of its spec."""
    x, spec = _tensor(dtype), QuantSpec(kind, **choices)
    steps = gpu.steps_of(spec)
    place = (AXES[axis], spec.block) if spec.block else (None, steps.run)
    plan = plan_tiles(x.shape, x.stride(), x.stride(), *place, steps.side)
    name = " ".join((kind, axis, dtype, *choices.values()))
    return Case(name, gpu, lambda: gpu._launch(x, x, spec, AXES[axis], 7, None), plan, x.dtype)


def of_hadamard(points: int, axis: str) -> Case:
    """Return the Hadamard transform of so many points."""
    x, how = _tensor("bf16"), Hadamard(points, "random")
    plan = plan_tiles(x.shape, x.stride(), x.stride(), AXES[axis], points, 1)
    name = f"hadamard-{points} {axis} bf16"
    return Case(name, hadamard, lambda: hadamard._launch(x, x, how, AXES[axis], 7), plan, x.dtype)


def _tensor(dtype: str) -> torch.Tensor:
    return torch.empty(SIZE, SIZE, dtype=DTYPES[dtype], device="meta")


def share(case: Case, row: dict[str, object], name: str) -> float:
    """Return the part of a device's memory bandwidth that a kernel can reach, at most.

    The least of what three things allow: issuing its instructions, having enough loads on their
    way with the warps that fit by registers, and 1. Each element is read and written once.
    """
    _, flops_per_clock, processors = DEVICES[name]
    of = device(name)
    clock = of.bf16_tflops * 1e12 / (flops_per_clock * processors)
    width, bandwidth = case.dtype.itemsize, of.memory_gbs * 1e9
    elements = bandwidth / (2 * width)  # a second
    issued = LANES * processors * clock / float(row["instructions"])
    # Registers are given to a warp in portions of 8 a thread.
    warps = min(WARPS, REGISTERS // (32 * -(-int(row["registers"]) // 8) * 8))
    on_the_way = warps * 32 * case.elements * width * processors
    return min(1.0, issued / elements, on_the_way / LATENCY / (bandwidth / 2))


def main() -> None:
    """Compile all, write the table, print it with the estimates."""
    rows = []
    print(f"| kernel | | instructions | registers | spills | {' | '.join(DEVICES)} |")
    print("|" + "---|" * (5 + len(DEVICES)))
    for case in cases():
        for architecture in ARCHITECTURES:
            print(case.name, architecture, file=sys.stderr)
            row = case.row(architecture)
            rows.append(row)
            shares = [
                f"{share(case, row, name):.0%}" if of[0] == architecture else ""
                for name, of in DEVICES.items()
            ]
            print(f"| {' | '.join(map(str, [*row.values(), *shares]))} |", flush=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
