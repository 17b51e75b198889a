"""Compares the simulated tensor core with results of GPUs, bit for bit: a markdown table.

    git clone https://github.com/north-numerical-computing/MATLAB-tensor-core FOLDER
    .venv/bin/python benchmarks/tensor_core_check.py FOLDER/model_validation

The authors of arXiv 2512.07004 publish what one instruction of each GPU made of 5,000 random
vectors. Each row of a_* and b_* is a vector, c_* is what the accumulator held, d_* the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "Megatron-LM"))

from accumulators import BF16, BLACKWELL_FP8, HOPPER_FP8, TensorCore, tensor_core

# Rows that are multiplied at once: of their products only the diagonal is needed.
ROWS = 50
# GPU, format, model, and whether the accumulator held c: warp group instructions began at 0.
CASES = (
    ("H100", "E4M3", HOPPER_FP8, False),
    ("H100", "E5M2", HOPPER_FP8, False),
    ("Ada", "E4M3", TensorCore(bits=14, kept=14, chunk=16), True),
    ("Ada", "E5M2", TensorCore(bits=14, kept=14, chunk=16), True),
    ("H100", "bf16", BF16, True),
    ("B200", "bf16", BF16, True),
    ("B200", "E4M3", BLACKWELL_FP8, True),
    ("B200", "E5M2", BLACKWELL_FP8, True),
)


def main() -> None:
    """Compare all, and print how many results are equal."""
    folder = Path(sys.argv[1])
    print("| GPU | format | model | results | equal | equal to the sum rounded to nearest |")
    print("|---|---|---|---|---|---|")
    for gpu, kind, core, has_start in CASES:
        a, b = (read(folder / gpu / kind / f"{x}_{gpu}_{kind}.txt", base=16) for x in "ab")
        start, result = (read(folder / gpu / kind / f"{x}_{gpu}_fp32.txt", base=2) for x in "cd")
        start = start * has_start
        a, b = (x.reshape(len(result), -1) for x in (a, b))
        equal = (simulate(a, b, core, start) == result).sum().item()
        nearest = (((a * b).sum(dim=1) + start).float() == result).sum().item()
        cells = f"{core.bits} bits, {core.kept} kept, {core.chunk} products | {len(result)}"
        print(f"| {gpu} | {kind} | {cells} | {equal} | {nearest} |")


def simulate(a: Tensor, b: Tensor, core: TensorCore, start: Tensor) -> Tensor:
    """Return the dot product of each row of a and b [M, K], plus start [M]: float64 [M]."""
    parts = zip(a.split(ROWS), b.split(ROWS), start.split(ROWS), strict=True)
    return torch.cat([tensor_core(*pair, core, one).diagonal() for *pair, one in parts])


def read(path: Path, base: int) -> Tensor:
    """Read float32 patterns, written in a base, as float64."""
    words = np.array([int(word, base) for word in path.read_text().split()], dtype=np.uint32)
    return torch.from_numpy(words.view(np.float32)).double()


if __name__ == "__main__":
    main()
