"""Everything that waits for a GPU, in one run: benchmarks/gpu_all.sh starts it.

    bash benchmarks/gpu_all.sh               on a machine with one GPU, under ten minutes
    bash benchmarks/gpu_all.sh --rehearse    the same programs, small, on a CPU

Writes benchmarks/results/gpu-DATE.md: each part's output, and what its figures decide. A part that
fails is shown with the end of its output, and the others run. Exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from mqo.project import Project

ROOT = Project.here().root
TESTS = " ".join(
    f"tests/megatron/{name}"
    for name in ("quant/test_gpu.py", "quant/test_gpu_hadamard.py", "attention/test_gpu.py")
)
PYTEST = f"-m pytest -q -p no:cacheprovider -W ignore -m 'not heavy' {TESTS}"
SMALL = "--hidden 128 --layers 1 --sequence 128"
VARIANTS = (
    "bf16 mxfp8 FA_linear_mxfp8 'FA_linear_mxfp8, all GEMMs' FA_linear_mxfp4 FA_linear_hifp8 "
    "'recipe mxfp8' 'recipe nvfp4' 'recipe hif4' 'recipe fp8-blockwise' 'recipe fp8-tensorwise' "
    "'recipe mxfp4-backward'"
)
ENGINE_RUN = "script/train_config.py --model llama32-1b --dataset wikipedia --training-config tiny"
ENGINE_WORDS = "-- --transformer-impl transformer_engine --train-samples 160"
LINES = 40  # of a failed part's output


@dataclass(frozen=True)
class Part:
    """A program with its words, those of the rehearsal, and what its figures decide.

    `interpreted` rehearsals run kernels in Triton's interpreter.
    """

    title: str
    words: str
    small: str
    decides: str
    interpreted: bool = False
    limit_s: int = 180


PARTS = (
    Part(
        "Kernels against their references",
        PYTEST,
        f"{PYTEST} --collect-only",
        "Whether the kernels are right where they run, CUDA graphs included. If not, nothing below "
        "counts.",
    ),
    Part(
        "Quantizers: share of a copy's bandwidth",
        "benchmarks/quant_gpu.py",
        "benchmarks/quant_gpu.py --size 64 --formats mxfp8",
        "Whether the estimates of results/kernels.csv hold; which kernel needs work (below 85 %); "
        "whether runs of 64 bytes, which hif4's columns have, are wide enough.",
        interpreted=True,
    ),
    Part(
        "Attention with a PV type",
        "benchmarks/attention_gpu.py",
        "benchmarks/attention_gpu.py --lengths 64 --types mxfp8",
        "Whether --attention-backend auto takes the kernel in the place of chunks.",
        interpreted=True,
    ),
    Part(
        "Experts: grouped beside one by one",
        "benchmarks/experts.py",
        "benchmarks/experts.py --tokens 256 --hidden 64 --width 64 --repeats 1",
        "Whether the launcher passes --moe-grouped-gemm by itself.",
    ),
    Part(
        "A step of modes and recipes beside bf16",
        "benchmarks/step.py --dtype bf16 --hidden 2048 --layers 4 --sequence 4096 --rounds 1 "
        f"--only {VARIANTS}",
        f"benchmarks/step.py --dtype bf16 {SMALL} --rounds 1 --only bf16 mxfp8",
        "What emulation costs on a GPU; the figures of README and docs/quantization.md.",
        limit_s=420,
    ),
    Part(
        "Transformer Engine: our emulation beside its own kernels",
        "benchmarks/engine.py",
        "benchmarks/engine.py --stub 2.20.2 --tokens 128 --hidden 128 --repeats 1",
        "Whether mxfp8 and nvfp4 as emulated train as the hardware's do (differences beyond those "
        "of accumulation in mxfp8 and fp8 are faults), and what the factory costs of a layer.",
    ),
    Part(
        "A run of Transformer Engine's layers",
        f"{ENGINE_RUN} --quantization FA_linear_mxfp8 --gemms all {ENGINE_WORDS}",
        f"{ENGINE_RUN} --quantization FA_linear_mxfp8 --gemms all --dry-run {ENGINE_WORDS}",
        "Whether a mode runs to its end with its layers: the guard ends it if one did not ask. It "
        "fails where Transformer Engine is not installed.",
    ),
    Part(
        "Peak memory beside the simulation's",
        "benchmarks/gpu_memory.py",
        f"benchmarks/gpu_memory.py {SMALL} --only bf16",
        "The allowances of mqo simulate and the launcher: what torch's allocator has on top.",
    ),
)


def main() -> None:
    """Run all parts, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU")
    parser.add_argument("--out", type=Path, help="the file; by default results/gpu-DATE.md")
    given = parser.parse_args()
    if not (given.rehearse or torch.cuda.is_available()):
        sys.exit("There is no CUDA device here. --rehearse tries the programs on a CPU.")
    today = datetime.date.today().isoformat()
    target = given.out or ROOT / f"benchmarks/results/gpu-{today}.md"
    text, failed = [heading(today, given.rehearse)], []
    for part in PARTS:
        print(f"{part.title} ...", file=sys.stderr, flush=True)
        found, code = run(part, given.rehearse)
        text.append(found)
        failed += [part.title] * (code != 0)
        target.write_text("\n".join(text), encoding="utf-8")
    print(target)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def heading(today: str, rehearsal: bool) -> str:
    """Return the machine, the commit and the versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    where = "a CPU" if rehearsal else torch.cuda.get_device_name()
    kind = "**A rehearsal: no figure means anything.**" if rehearsal else ""
    return (
        f"# On a GPU, {today}\n\n`bash benchmarks/gpu_all.sh` on {where}, commit {commit}, torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}. {kind}\n"
    )


def run(part: Part, rehearsal: bool) -> tuple[str, int]:
    """Return a part's section, and its exit code; 124 if it took too long."""
    words = part.small if rehearsal else part.words
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path())}
    if rehearsal and part.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *shlex.split(words)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=part.limit_s,
        )
        code, out, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, errors = 124, str(late.stdout or ""), f"longer than {part.limit_s} s"
    took = f"{time.monotonic() - start:.0f} s"
    body = out.strip() if "|" in out or code == 0 else ""
    if code:
        last = "\n".join((out + errors).splitlines()[-LINES:])
        body += f"\n\nFAILED, exit {code}:\n\n```\n{last}\n```"
    command = f"`{words}`, {took}"
    return f"## {part.title}\n\n{command}\n\n{body}\n\nDecides: {part.decides}\n", code


def search_path() -> list[str]:
    """Return where modules are, the Triton of tests/get_packages.py behind an installed one."""
    return [str(ROOT / "Megatron-LM"), str(ROOT / ".cache/triton")]


if __name__ == "__main__":
    main()
