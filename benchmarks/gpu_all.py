"""Run all checks and benchmarks that need a GPU; benchmarks/gpu_all.sh starts it.

    bash benchmarks/gpu_all.sh               on a machine with one GPU, under ten minutes
    bash benchmarks/gpu_all.sh --rehearse    the same programs with small sizes, on a CPU

Writes benchmarks/results/gpu-DATE.md: the output of each program, and what its figures decide. If a
program fails, the file gets the end of its output, and the others still run. Exits with 1 if any
program failed.
"""

from __future__ import annotations

import importlib.util
import sys

import torch
from runner import ROOT, Benchmark, introduction, options, run_all

TESTS = " ".join(f"tests/mqo/quant/test_{name}.py" for name in ("gpu", "gpu_hadamard", "products"))
# Without those that start Triton's interpreter. Most of the time goes into compiling kernels.
PYTEST = (
    "-m pytest -q -n 8 -p no:cacheprovider -W ignore -m 'not heavy' -k 'not in_the_interpreter' "
    f"{TESTS}"
)
SMALL = "--hidden 128 --layers 1 --sequence 128"
VARIANTS = (
    "bf16 mxfp8 FA_linear_mxfp8 'FA_linear_mxfp8, all GEMMs' FA_linear_mxfp4 FA_linear_hifp8 "
    "'recipe mxfp8' 'recipe nvfp4' 'recipe hif4' 'recipe fp8-blockwise' 'recipe fp8-tensorwise' "
    "'recipe mxfp4-backward' 'recipe nvfp4-four-over-six' 'recipe averis'"
)
ENGINE_RUN = (
    "script/train_config.py --model llama32-1b --dataset wikipedia --training-config tiny "
    "--quantization FA_linear_mxfp8 --gemms all"
)
SAMPLES = "--train-samples 160"
STUBBED = "2.20.2"  # the release of Transformer Engine whose Python code a rehearsal runs

BENCHMARKS = (
    Benchmark(
        "Kernels compared with their references",
        PYTEST,
        f"{PYTEST} -n 0 --collect-only",
        "Decides whether the kernels are correct on a GPU, also in CUDA graphs. If not, ignore all "
        "figures below.",
    ),
    Benchmark(
        "Quantizers: share of a copy's bandwidth",
        "benchmarks/quant_gpu.py",
        "benchmarks/quant_gpu.py --size 64 --formats mxfp8",
        "Decides whether the estimates in results/kernels.csv are right; which kernels need work "
        "(below 85 %); whether the 64-byte runs of hif4's columns are wide enough.",
        interpreted=True,
    ),
    Benchmark(
        "Experts: grouped compared with one by one",
        "benchmarks/experts.py",
        "benchmarks/experts.py --tokens 256 --hidden 64 --width 64 --repeats 1",
        "Decides whether the launcher passes --moe-grouped-gemm by default.",
    ),
    Benchmark(
        "A training step of modes and recipes",
        "benchmarks/step.py --dtype bf16 --hidden 2048 --layers 4 --sequence 4096 --rounds 1 "
        f"--only {VARIANTS}",
        f"benchmarks/step.py --dtype bf16 {SMALL} --rounds 1 --only bf16 mxfp8 'recipe averis'",
        "Decides what emulation costs on a GPU: the figures in README and docs/quantization.md.",
        limit_s=420,
    ),
    Benchmark(
        "Transformer Engine: our emulation compared with its own kernels",
        "benchmarks/engine.py",
        f"benchmarks/engine.py --stub {STUBBED} --tokens 128 --hidden 128 --repeats 1",
        "Decides whether emulated mxfp8 and nvfp4 train like the hardware's (in mxfp8 and fp8, any "
        "difference beyond accumulation is a bug), and what the quantizer factory costs.",
    ),
    Benchmark(
        "A run with Transformer Engine's layers",
        f"{ENGINE_RUN} -- --transformer-impl transformer_engine {SAMPLES}",
        # Local layers, since those of Transformer Engine are refused without a GPU.
        f"{ENGINE_RUN} --dry-run -- {SAMPLES}",
        "Decides whether a run with TE layers finishes: the guard stops it if a layer does not "
        "call its quantizers. Fails if Transformer Engine is not installed.",
    ),
    Benchmark(
        "Peak memory, measured and simulated",
        "benchmarks/gpu_memory.py",
        f"benchmarks/gpu_memory.py {SMALL} --only bf16",
        "Decides the allowances of mqo simulate and the launcher for the overhead of torch's "
        "allocator.",
    ),
)


def main() -> None:
    """Run all programs, and write the results."""
    rehearsal, target = options("gpu", __doc__)
    if not (rehearsal or torch.cuda.is_available()):
        sys.exit("No CUDA device was found. `--rehearse` runs the programs on a CPU.")
    if rehearsal and (names := missing_packages()):
        sys.exit(
            f"The rehearsal needs {' and '.join(names)}. Install them with "
            "`.venv/bin/python tests/get_packages.py`."
        )
    machine = "a CPU" if rehearsal else torch.cuda.get_device_name()
    text = introduction("On a GPU", "bash benchmarks/gpu_all.sh", machine, rehearsal)
    run_all(BENCHMARKS, rehearsal, target, text)


def missing_packages() -> list[str]:
    """Return the GPU packages that a rehearsal needs and that are missing."""
    engine = ROOT / ".cache/transformer_engine" / STUBBED
    packages = {
        "Triton": importlib.util.find_spec("triton") or (ROOT / ".cache/triton").is_dir(),
        f"Transformer Engine {STUBBED}": engine.is_dir(),
    }
    return [name for name, is_present in packages.items() if not is_present]


if __name__ == "__main__":
    main()
