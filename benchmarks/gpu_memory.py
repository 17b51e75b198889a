"""A training's peak memory on a GPU beside `mqo simulate`'s.

    .venv/bin/python benchmarks/gpu_memory.py [--layers 4] [--sequence 8192]

llama32-1b, cut to so many layers, in bfloat16 on one GPU, some steps of each variant. "Measured" is
the most that torch's allocator had handed out, "simulated" what the same flags need without the
allowance for what no simulation sees. Without a GPU the measured figure is the whole process.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mqo.launch.config import RunConfig, resolve
from mqo.launch.machine import detect
from mqo.launch.run import run
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.recipes.recipe import read
from mqo.runs import RunFolder
from mqo.simulate import jobs
from mqo.simulate.result import needed

PROJECT = Project.here()
STEPS = 4
# {a variant: (mode, recipe)}
VARIANTS = {
    "bf16": ("bf16", ""),
    "FA_linear_mxfp8": ("FA_linear_mxfp8", ""),
    "qk_pv_mxfp8": ("qk_pv_mxfp8", ""),
    "recipe nvfp4": ("bf16", "nvfp4"),
}


def main() -> None:
    """Train and simulate each variant, and print a row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, size in (("hidden", 2048), ("layers", 4), ("sequence", 8192)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    given = parser.parse_args()
    print("| variant | measured, MiB | simulated | measured of simulated |\n|---|---|---|---|")
    for name in given.only:
        config = configured(name, given)
        found, expected = measured(config), simulated(config)
        sizes = " | ".join(f"{size / 2**20:,.0f}" for size in (found, expected))
        print(f"| {name} | {sizes} | {found / expected:.3f} |", flush=True)


def configured(name: str, given: argparse.Namespace) -> RunConfig:
    """Return a variant's run, with one sequence a step."""
    mode, recipe = VARIANTS[name]
    sizes = {"hidden-size": given.hidden, "ffn-hidden-size": 4 * given.hidden}
    sizes |= {"num-layers": given.layers, "seq-length": given.sequence}
    sizes |= {"max-position-embeddings": given.sequence, "micro-batch-size": 1}
    sizes |= {"global-batch-size": 2, "train-samples": 2 * STEPS, "eval-iters": 0}
    flags = tuple(word for flag, size in sizes.items() for word in (f"--{flag}", str(size)))
    return resolve(
        *("llama32-1b", "wikipedia", mode, "tiny"),
        dtype="bf16",
        recipe=read(recipe) if recipe else None,
        extra_flags=flags,
    )


def measured(config: RunConfig) -> int:
    """Return the peak of a training, in runs/."""
    done = run(PROJECT, config, report=lambda text: print(text, file=sys.stderr, flush=True))
    device = json.loads(RunFolder(Path(done.run)).device.read_text(encoding="utf-8"))
    return max(device["peak_memory"])


def simulated(config: RunConfig) -> int:
    """Return the bytes that the run's tensors take, of whatever the machine has."""
    types = dict(config.quantization.types or {})
    job = jobs.Job.of(config, detect(), types, 1.0)
    series, tree = Series.of(PROJECT), Tree(PROJECT.tree)
    (rank,) = jobs.simulate(PROJECT, tree, series, job, lambda text: None)
    return needed(rank)


if __name__ == "__main__":
    main()
