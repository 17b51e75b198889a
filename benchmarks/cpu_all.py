"""The benchmarks that need no GPU, in one run: benchmarks/README.md has its figures.

    .venv/bin/python benchmarks/cpu_all.py
    .venv/bin/python benchmarks/cpu_all.py --rehearse    the same programs, small

Writes benchmarks/results/cpu-DATE.md. Nothing else may run on the machine: most parts are times. A
part that fails is shown with the end of its output, and the others run. Exits with 1 if one failed.
"""

from __future__ import annotations

import os
import platform

from parts import Part, introduction, options, run_all

SMALL = "--hidden 128 --layers 1 --sequence 128 --rounds 1 --only bf16 mxfp8"
RECIPES = (
    "'recipe mxfp8' 'recipe fp8-tensorwise' 'recipe fp8-blockwise' 'recipe nvfp4' "
    "'recipe mxfp4-backward' 'recipe hif4'"
)

PARTS = (
    Part(
        "Quantizers",
        "benchmarks/quant.py",
        "benchmarks/quant.py --repeats 1",
        "Read the ratios to a copy of the matrix.",
        limit_s=600,
    ),
    Part(
        "Attention with and without types",
        "benchmarks/attention.py --lengths 1024 2048",
        "benchmarks/attention.py --lengths 128 --repeats 1",
        "Read the ratios to the unfused path, which is upstream's.",
        limit_s=600,
    ),
    Part(
        "Losses over a vocabulary",
        "benchmarks/losses.py",
        "benchmarks/losses.py --tokens 64 --vocabulary 512 --repeats 1",
        "Times are CPU seconds; memory is in tensors of the logits' size and dtype.",
    ),
    Part(
        "Experts: grouped beside one by one",
        "benchmarks/experts.py --tokens 2048 --hidden 512 --width 352",
        "benchmarks/experts.py --tokens 256 --hidden 64 --width 64 --repeats 1",
        "A quarter of the model's sizes.",
    ),
    Part(
        "A training step of modes and recipes",
        f"benchmarks/step.py --rounds 2 --only upstream bf16 mxfp8 FA_linear_mxfp8 {RECIPES}",
        f"benchmarks/step.py {SMALL}",
        "Ratios of one round's median steps. The aim is 1.25 of bf16's step.",
        limit_s=1200,
    ),
    Part(
        "Sums of a GEMM beside its quantization",
        "benchmarks/accumulation.py --quick",
        "benchmarks/accumulation.py --quick",
        "docs/emulation.md says what these errors mean.",
        limit_s=600,
    ),
    Part(
        "From the command to the first step",
        "benchmarks/start.py --rounds 3",
        "benchmarks/start.py --rounds 1",
        "Seconds from the command on.",
    ),
)


def main() -> None:
    """Run all parts, and write the result."""
    rehearsal, target = options("cpu", __doc__)
    machine = f"{os.cpu_count()} {platform.machine()} CPUs"
    command = ".venv/bin/python benchmarks/cpu_all.py"
    run_all(PARTS, rehearsal, target, introduction("On a CPU", command, machine, rehearsal))


if __name__ == "__main__":
    main()
