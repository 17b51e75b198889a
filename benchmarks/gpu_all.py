"""Everything that waits for a GPU, in one run: benchmarks/gpu_all.sh starts it.

    bash benchmarks/gpu_all.sh               on a machine with one GPU, under ten minutes
    bash benchmarks/gpu_all.sh --rehearse    the same programs, small, on a CPU

Writes benchmarks/results/gpu-DATE.md: each part's output, and what its figures decide. A part that
fails is shown with the end of its output, and the others run. Exits with 1 if one failed.
"""

from __future__ import annotations

import importlib.util
import sys

import torch
from parts import ROOT, Part, introduction, options, run_all

TESTS = "tests/mqo/quant/test_gpu.py tests/mqo/quant/test_gpu_hadamard.py"
PYTEST = f"-m pytest -q -p no:cacheprovider -W ignore -m 'not heavy' {TESTS}"
SMALL = "--hidden 128 --layers 1 --sequence 128"
VARIANTS = (
    "bf16 mxfp8 FA_linear_mxfp8 'FA_linear_mxfp8, all GEMMs' FA_linear_mxfp4 FA_linear_hifp8 "
    "'recipe mxfp8' 'recipe nvfp4' 'recipe hif4' 'recipe fp8-blockwise' 'recipe fp8-tensorwise' "
    "'recipe mxfp4-backward'"
)
ENGINE_RUN = (
    "script/train_config.py --model llama32-1b --dataset wikipedia --training-config tiny "
    "--quantization FA_linear_mxfp8 --gemms all"
)
SAMPLES = "--train-samples 160"
STUBBED = "2.20.2"  # the release of Transformer Engine whose Python code a rehearsal runs

PARTS = (
    Part(
        "Kernels against their references",
        PYTEST,
        f"{PYTEST} --collect-only",
        "Decides whether the kernels are right where they run, CUDA graphs included. If not, "
        "nothing below counts.",
    ),
    Part(
        "Quantizers: share of a copy's bandwidth",
        "benchmarks/quant_gpu.py",
        "benchmarks/quant_gpu.py --size 64 --formats mxfp8",
        "Decides whether the estimates of results/kernels.csv hold; which kernel needs work (below "
        "85 %); whether runs of 64 bytes, which hif4's columns have, are wide enough.",
        interpreted=True,
    ),
    Part(
        "Experts: grouped beside one by one",
        "benchmarks/experts.py",
        "benchmarks/experts.py --tokens 256 --hidden 64 --width 64 --repeats 1",
        "Decides whether the launcher passes --moe-grouped-gemm by itself.",
    ),
    Part(
        "A step of modes and recipes beside bf16",
        "benchmarks/step.py --dtype bf16 --hidden 2048 --layers 4 --sequence 4096 --rounds 1 "
        f"--only {VARIANTS}",
        f"benchmarks/step.py --dtype bf16 {SMALL} --rounds 1 --only bf16 mxfp8",
        "Decides what emulation costs on a GPU; the figures of README and docs/quantization.md.",
        limit_s=420,
    ),
    Part(
        "Transformer Engine: our emulation beside its own kernels",
        "benchmarks/engine.py",
        f"benchmarks/engine.py --stub {STUBBED} --tokens 128 --hidden 128 --repeats 1",
        "Decides whether mxfp8 and nvfp4 as emulated train as the hardware's do (differences "
        "beyond those of accumulation in mxfp8 and fp8 are faults), and what the factory costs.",
    ),
    Part(
        "A run of Transformer Engine's layers",
        f"{ENGINE_RUN} -- --transformer-impl transformer_engine {SAMPLES}",
        # Local layers: those of Transformer Engine are refused where there is no GPU.
        f"{ENGINE_RUN} --dry-run -- {SAMPLES}",
        "Decides whether a mode runs to its end with its layers: the guard ends it if one did not "
        "ask. It fails where Transformer Engine is not installed.",
    ),
    Part(
        "Peak memory beside the simulation's",
        "benchmarks/gpu_memory.py",
        f"benchmarks/gpu_memory.py {SMALL} --only bf16",
        "Decides the allowances of mqo simulate and the launcher: what torch's allocator has on "
        "top.",
    ),
)


def main() -> None:
    """Run all parts, and write the result."""
    rehearsal, target = options("gpu", __doc__)
    if not (rehearsal or torch.cuda.is_available()):
        sys.exit("There is no CUDA device here. --rehearse tries the programs on a CPU.")
    if rehearsal and (names := lacking()):
        sys.exit(
            f"The rehearsal lacks {' and '.join(names)}. `.venv/bin/python tests/get_packages.py` "
            "brings what tests and rehearsals need."
        )
    machine = "a CPU" if rehearsal else torch.cuda.get_device_name()
    text = introduction("On a GPU", "bash benchmarks/gpu_all.sh", machine, rehearsal)
    run_all(PARTS, rehearsal, target, text)


def lacking() -> list[str]:
    """Return the packages of a GPU's that a rehearsal needs, and that are not there."""
    engine = ROOT / ".cache/transformer_engine" / STUBBED
    there = {
        "Triton": importlib.util.find_spec("triton") or (ROOT / ".cache/triton").is_dir(),
        f"Transformer Engine {STUBBED}": engine.is_dir(),
    }
    return [name for name, found in there.items() if not found]


if __name__ == "__main__":
    main()
