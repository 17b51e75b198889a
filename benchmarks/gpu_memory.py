"""Compare the peak memory of trainings on a GPU with the prediction of `mqo simulate`.

    .venv/bin/python benchmarks/gpu_memory.py [--layers 4] [--sequence 8192]

Trains llama32-1b with --layers layers in bfloat16 on one GPU, four steps per variant. "Measured" is
the peak of the memory that torch's allocator handed out. "Simulated" is the prediction for the same
flags, without the allowance for memory that the simulation cannot count. Without a GPU, "measured"
is the peak of the whole process.
"""

from __future__ import annotations

from mqo.launch.config import RunConfig
from mqo.launch.machine import detect
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.simulate import jobs
from mqo.simulate.result import needed
from step import Variant, configured, peak_of, trained
from timing import options

PROJECT = Project.here()
STEPS = 4
VARIANTS = {
    "bf16": Variant("bf16"),
    "FA_linear_mxfp8": Variant("FA_linear_mxfp8"),
    "qk_pv_mxfp8": Variant("qk_pv_mxfp8"),
    "recipe nvfp4": Variant("bf16", recipe="nvfp4"),
}


def main() -> None:
    """Train and simulate each variant, and print its row."""
    parser = options(__doc__, hidden=2048, layers=4, sequence=8192)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.set_defaults(dtype="bf16")
    given = parser.parse_args()
    print("| variant | measured, MiB | simulated, MiB | measured / simulated |\n|---|---|---|---|")
    for name in given.only:
        config = configured(VARIANTS[name], given, batch=2, steps=STEPS)
        measured, expected = peak_of(trained(config)), simulated(config)
        sizes = " | ".join(f"{size / 2**20:,.0f}" for size in (measured, expected))
        print(f"| {name} | {sizes} | {measured / expected:.3f} |", flush=True)


def simulated(config: RunConfig) -> int:
    """Return the bytes that the run's tensors need, even if this machine has less."""
    types = dict(config.quantization.types or {})
    job = jobs.RunJob.from_config(config, detect(), types, 1.0)
    series, tree = Series.of_project(PROJECT), Tree(PROJECT.tree)
    (rank,) = jobs.simulate(PROJECT, tree, series, job, lambda text: None)
    return needed(rank)


if __name__ == "__main__":
    main()
