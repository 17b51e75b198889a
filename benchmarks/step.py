"""Measure time and memory of a training step in modes and recipes, bf16 and unpatched Megatron.

    .venv/bin/python benchmarks/step.py [--hidden 1024] [--layers 2] [--sequence 1024] [--rounds 5]
        [--dtype fp32]

Trains llama32-1b with the given width, depth and sequence length, one sequence per step, on a CUDA
device if there is one, else on the CPU. "upstream" is the same trainer without the patches that
quantize, fuse attention or watch a run; the others are needed to run it here. All variants take
turns, --rounds times. A ratio compares the median steps of two variants in one round; the table has
its median and quartiles over the rounds. MiB is the peak memory of the process (on a GPU: of
torch's allocator).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from mqo.launch.config import RunConfig, resolve
from mqo.launch.run import run
from mqo.matrix.tables import Gemms
from mqo.perf.ratio import median_step, quartiles
from mqo.project import Project
from mqo.quant.recipe_files import names
from mqo.recipes.recipe import read
from mqo.runs import STEP_TIME, RunFolder
from timing import options

PROJECT = Project.here()
STEPS, HEAD = 10, 64
UNFUSED = ("--attention-backend", "unfused")
BASE = "bf16"


@dataclass(frozen=True)
class Variant:
    """A training: its mode or recipe, the patches left out, and flags."""

    mode: str
    without: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    gemms: Gemms = "fprop"
    recipe: str = ""
    plugin: str = ""


EXAMPLES = "tools/mqo/quant/recipes/"
_OWN = ("four_over_six", "ms_eden", "ue5m3", "averis")
VARIANTS = {
    "upstream": Variant("bf16", ("quant_sites", "weight_epochs", "run_hooks")),
    "bf16, unfused attention": Variant("bf16", flags=UNFUSED),
    BASE: Variant("bf16"),
    "mxfp8": Variant("mxfp8"),
    "mxfp8, unfused attention": Variant("mxfp8", flags=UNFUSED),
    "FA_linear_mxfp8": Variant("FA_linear_mxfp8"),
    "FA_linear_mxfp8, all GEMMs": Variant("FA_linear_mxfp8", gemms="all"),
    "FA_linear_mxfp4": Variant("FA_linear_mxfp4"),
    "FA_linear_hifp8": Variant("FA_linear_hifp8"),
    **{f"recipe {name}": Variant(BASE, recipe=name) for name in names()},
    **{
        f"quantizer {name}": Variant(f"linear_{name}", gemms="all", plugin=f"{EXAMPLES}{name}.py")
        for name in _OWN
    },
}


def main() -> None:
    """Train all variants in turns, and print one row per variant."""
    parser = options(__doc__, hidden=1024, layers=2, sequence=1024, rounds=5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    given = parser.parse_args()
    rounds = [{name: measured(name, given) for name in given.only} for _ in range(given.rounds)]
    ratios = "/ bf16 | quartiles | / upstream | quartiles"
    print(f"| variant | ms per step | {ratios} | MiB | / bf16 |\n|{'---|' * 8}")
    for name in given.only:
        cells = [name, f"{1000 * statistics.median(costs[name].seconds for costs in rounds):.0f}"]
        for other in (BASE, "upstream"):
            if name == other or other not in given.only:
                cells += ["", ""]
                continue
            ratio = quartiles([costs[name].seconds / costs[other].seconds for costs in rounds])
            spread = "" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"
            cells += [f"{ratio.median:.2f}x", spread]
        cells.append(f"{statistics.median(costs[name].peak for costs in rounds) / 2**20:.0f}")
        shares = [costs[name].peak / costs[BASE].peak for costs in rounds if BASE in costs]
        cells.append(f"{statistics.median(shares):.2f}x" if shares and name != BASE else "")
        print(f"| {' | '.join(cells)} |")


@dataclass(frozen=True)
class StepCost:
    """The median step of a training in seconds, and the peak memory of its process in bytes."""

    seconds: float
    peak: int


def measured(name: str, given: argparse.Namespace) -> StepCost:
    """Measure a short training, in runs/."""
    folder = trained(configured(VARIANTS[name], given, batch=1, steps=STEPS))
    return StepCost(median_step(dict(folder.read_metrics()[STEP_TIME])), peak_of(folder))


def configured(variant: Variant, given: argparse.Namespace, *, batch: int, steps: int) -> RunConfig:
    """Return the configuration of a short training, with micro-batches of one sequence."""
    heads = given.hidden // HEAD
    sizes = {"hidden-size": given.hidden, "ffn-hidden-size": 4 * given.hidden}
    sizes |= {"num-attention-heads": heads, "num-query-groups": max(1, heads // 4)}
    sizes |= {"num-layers": given.layers, "seq-length": given.sequence}
    sizes |= {"max-position-embeddings": given.sequence, "micro-batch-size": 1}
    sizes |= {"global-batch-size": batch, "train-samples": batch * steps, "eval-iters": 0}
    flags = [word for flag, size in sizes.items() for word in (f"--{flag}", str(size))]
    return resolve(
        *("llama32-1b", "wikipedia", variant.mode, "tiny"),
        dtype=given.dtype,
        gemms=variant.gemms,
        recipe=read(variant.recipe) if variant.recipe else None,
        plugins=[PROJECT.root / variant.plugin] if variant.plugin else (),
        without=variant.without,
        extra_flags=(*flags, *variant.flags),
    )


def trained(config: RunConfig) -> RunFolder:
    """Train in runs/, and return the run's folder."""
    result = run(PROJECT, config, report=lambda text: print(text, file=sys.stderr, flush=True))
    return RunFolder(Path(result.run))


def peak_of(folder: RunFolder) -> int:
    """Return the peak memory of a run in bytes, the largest over its processes."""
    return max(json.loads(folder.device.read_text(encoding="utf-8"))["peak_memory"])


if __name__ == "__main__":
    main()
