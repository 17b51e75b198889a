"""A training's peak memory on a GPU beside `mqo simulate`'s.

    .venv/bin/python benchmarks/gpu_memory.py [--layers 4] [--sequence 8192]

llama32-1b, cut to so many layers, in bfloat16 on one GPU, some steps of each variant. "Measured" is
the most that torch's allocator had handed out, "simulated" what the same flags need without the
allowance for what no simulation sees. Without a GPU the measured figure is the whole process.
"""

from __future__ import annotations

import argparse

from mqo.launch.config import RunConfig
from mqo.launch.machine import detect
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.simulate import jobs
from mqo.simulate.result import needed
from step import Variant, configured, peak_of, trained

PROJECT = Project.here()
STEPS = 4
VARIANTS = {
    "bf16": Variant("bf16"),
    "FA_linear_mxfp8": Variant("FA_linear_mxfp8"),
    "qk_pv_mxfp8": Variant("qk_pv_mxfp8"),
    "recipe nvfp4": Variant("bf16", recipe="nvfp4"),
}


def main() -> None:
    """Train and simulate each variant, and print a row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, size in (("hidden", 2048), ("layers", 4), ("sequence", 8192)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.set_defaults(dtype="bf16")
    given = parser.parse_args()
    print("| variant | measured, MiB | simulated | measured of simulated |\n|---|---|---|---|")
    for name in given.only:
        config = configured(VARIANTS[name], given, batch=2, steps=STEPS)
        found, expected = peak_of(trained(config)), simulated(config)
        sizes = " | ".join(f"{size / 2**20:,.0f}" for size in (found, expected))
        print(f"| {name} | {sizes} | {found / expected:.3f} |", flush=True)


def simulated(config: RunConfig) -> int:
    """Return the bytes that the run's tensors take, of whatever the machine has."""
    types = dict(config.quantization.types or {})
    job = jobs.Job.of(config, detect(), types, 1.0)
    series, tree = Series.of_project(PROJECT), Tree(PROJECT.tree)
    (rank,) = jobs.simulate(PROJECT, tree, series, job, lambda text: None)
    return needed(rank)


if __name__ == "__main__":
    main()
