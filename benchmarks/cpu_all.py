"""Run all benchmarks that need no GPU, one after the other.

    .venv/bin/python benchmarks/cpu_all.py
    .venv/bin/python benchmarks/cpu_all.py --rehearse    the same programs with small sizes

Writes benchmarks/results/cpu-DATE.md; benchmarks/README.md quotes its figures. Run it on an idle
machine, since most figures are times. If a benchmark fails, the file gets the end of its output,
and the others still run. Exits with 1 if any benchmark failed.
"""

from __future__ import annotations

import os
import platform

from runner import Benchmark, introduction, options, run_all

SMALL = "--hidden 128 --layers 1 --sequence 128 --rounds 1 --only bf16 mxfp8"
RECIPES = (
    "'recipe mxfp8' 'recipe fp8-tensorwise' 'recipe fp8-blockwise' 'recipe nvfp4' "
    "'recipe mxfp4-backward' 'recipe hif4' 'recipe nvfp4-four-over-six' 'recipe averis'"
)

BENCHMARKS = (
    Benchmark(
        "Quantizers",
        "benchmarks/quant.py",
        "benchmarks/quant.py --repeats 1",
        "Read the ratios to a copy of the matrix.",
        limit_s=600,
    ),
    Benchmark(
        "Attention with and without types",
        "benchmarks/attention.py --lengths 1024 2048",
        "benchmarks/attention.py --lengths 128 --repeats 1",
        "Read the ratios to the unfused path, which is upstream's.",
        limit_s=600,
    ),
    Benchmark(
        "Losses over a vocabulary",
        "benchmarks/losses.py",
        "benchmarks/losses.py --tokens 64 --vocabulary 512 --repeats 1",
        "Times are CPU seconds. Memory is in units of one tensor of logits.",
    ),
    Benchmark(
        "Experts: grouped compared with one by one",
        "benchmarks/experts.py --tokens 2048 --hidden 512 --width 352",
        "benchmarks/experts.py --tokens 256 --hidden 64 --width 64 --repeats 1",
        "Sizes are a quarter of those of deepseek2_lite.",
    ),
    Benchmark(
        "A training step of modes and recipes",
        f"benchmarks/step.py --rounds 2 --only upstream bf16 mxfp8 FA_linear_mxfp8 {RECIPES}",
        f"benchmarks/step.py {SMALL} 'recipe averis'",
        "Ratios of median steps within a round. The target is at most 1.25 times the bf16 step; a "
        "quantizer in Python, that of averis, has none.",
        limit_s=1500,
    ),
    Benchmark(
        "Accumulation error compared with quantization error",
        "benchmarks/accumulation.py --quick",
        "benchmarks/accumulation.py --quick",
        "docs/emulation.md explains these errors.",
        limit_s=600,
    ),
    Benchmark(
        "From the command to the first step",
        "benchmarks/start.py --rounds 3",
        "benchmarks/start.py --rounds 1",
        "Seconds since the command started.",
    ),
)


def main() -> None:
    """Run all benchmarks, and write the results."""
    rehearsal, target = options("cpu", __doc__)
    machine = f"{os.cpu_count()} {platform.machine()} CPUs"
    command = ".venv/bin/python benchmarks/cpu_all.py"
    run_all(BENCHMARKS, rehearsal, target, introduction("On a CPU", command, machine, rehearsal))


if __name__ == "__main__":
    main()
