"""A training step of the overlay beside upstream's, and of the modes beside bf16.

    .venv/bin/python benchmarks/step.py [--hidden 1024] [--layers 2] [--sequence 1024] [--rounds 5]
        [--dtype fp32]

llama32-1b with that width, depth and sequence, one sequence a step. "Upstream" is
the same trainer without the patches that quantize, fuse attention or watch a run: what is left
lets it run here. All variants take turns, --rounds times; the ratios are of the median steps of one
round, their median and quartiles. MiB is the most that the process held, the interpreter and its
libraries too.
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
from mqo.perf.ratio import median_step, noisy
from mqo.project import Project
from mqo.recipes.recipe import names, read
from mqo.runs import STEP_TIME, RunFolder

PROJECT = Project.here()
STEPS, HEAD = 10, 64
UNFUSED = ("--attention-backend", "unfused")
BASE = "bf16"


@dataclass(frozen=True)
class Variant:
    """What is trained: a mode or a recipe, the patches that are left out, and flags."""

    mode: str
    without: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    gemms: Gemms = "fprop"
    recipe: str = ""


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
}


def main() -> None:
    """Train all in turns, and print a row each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, size in (("hidden", 1024), ("layers", 2), ("sequence", 1024), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    given = parser.parse_args()
    rounds = [{name: measured(name, given) for name in given.only} for _ in range(given.rounds)]
    print("| variant | ms a step | of bf16 | quartiles | of upstream | quartiles | MiB | of bf16 |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.only:
        cells = [name, f"{1000 * statistics.median(one[name].seconds for one in rounds):.0f}"]
        for other in (BASE, "upstream"):
            if name == other or other not in given.only:
                cells += ["", ""]
                continue
            found = noisy([one[name].seconds / one[other].seconds for one in rounds])
            spread = "" if found.low is None else f"{found.low:.2f} to {found.high:.2f}"
            cells += [f"{found.median:.2f}x", spread]
        cells.append(f"{statistics.median(one[name].peak for one in rounds) / 2**20:.0f}")
        shares = [one[name].peak / one[BASE].peak for one in rounds if BASE in one]
        cells.append(f"{statistics.median(shares):.2f}x" if shares and name != BASE else "")
        print(f"| {' | '.join(cells)} |")


@dataclass(frozen=True)
class Measured:
    """The median step of a training in seconds, and the most bytes that its process held."""

    seconds: float
    peak: int


def measured(name: str, given: argparse.Namespace) -> Measured:
    """Measure a short training, in runs/."""
    folder = trained(configured(VARIANTS[name], given, batch=1, steps=STEPS))
    return Measured(median_step(dict(folder.read_metrics()[STEP_TIME])), peak_of(folder))


def configured(variant: Variant, given: argparse.Namespace, *, batch: int, steps: int) -> RunConfig:
    """Return a short training, in micro-batches of one sequence."""
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
        without=variant.without,
        extra_flags=(*flags, *variant.flags),
    )


def trained(config: RunConfig) -> RunFolder:
    """Train in runs/, and return the run's folder."""
    done = run(PROJECT, config, report=lambda text: print(text, file=sys.stderr, flush=True))
    return RunFolder(Path(done.run))


def peak_of(folder: RunFolder) -> int:
    """Return the most bytes that a process of the run held."""
    return max(json.loads(folder.device.read_text(encoding="utf-8"))["peak_memory"])


if __name__ == "__main__":
    main()
