"""Simulate the layouts that the launcher chooses from, and write tools/mqo/scale/simulated.csv.

    .venv/bin/python benchmarks/layouts.py > TABLE.md

For each model of the matrix on 8, 64 and 512 GPUs, with fused and with chunked attention, runs `mqo
simulate` on every layout in the launcher's order up to the first that fits an h100-80gb. Layouts
that need FAR times the limit or more by the formulas are skipped. On 512 GPUs the global batch is
one micro-batch per GPU. Prints the chosen layouts as a table, with the roofline of a step. Needs no
GPU.
"""

import csv
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mqo.errors import LayoutError
from mqo.launch.config import Cluster, RunConfig, resolve
from mqo.launch.layout import check_layout
from mqo.launch.machine import imagined
from mqo.launch.plan import workload_of
from mqo.matrix import tables
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.scale.choose import Fit, Workload, choose, compute
from mqo.scale.devices import GIB
from mqo.scale.layout import Layout
from mqo.scale.memory import CONTEXT, UNEVEN
from mqo.scale.simulated import KEYS, TABLE
from mqo.simulate import jobs
from mqo.simulate.result import Simulation

DEVICE, PER_NODE = "h100-80gb", 8
GPUS = (8, 64, 512)
# {attention: a mode that uses it}; other modes with the same attention have the same peak.
MODES = {"fused": "FA_linear_mxfp8", "chunked": "qk_pv_mxfp8"}
FAR = 1.25
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "quantizer", "temporary")


@dataclass(frozen=True)
class Tried:
    """A layout that was simulated."""

    attention: str
    layout: Layout
    result: Simulation

    def row(self) -> dict[str, object]:
        """Return its row of the table."""
        experiment, worst = self.result.config.experiment, self.result.worst
        sizes = (worst.global_batch, worst.micro_batch, worst.sequence)
        flags = " ".join(self.layout.flags(experiment.dtype))
        key = (experiment.model.name, self.layout.gpus, *sizes)
        key += (experiment.dtype, self.attention, flags)
        need = self.result.need - CONTEXT
        return dict(zip(KEYS, key, strict=True)) | {"bytes": need, **worst.kinds}


def main() -> None:
    """Simulate all cases, write the table, and print the chosen layouts."""
    tried: list[Tried] = []
    names = "layout | formulas, GiB | simulated, GiB | GEMMs, s | others, s | sent, s | step, s"
    print(f"| model | GPUs | attention | {names} |")
    print("|" + "---|" * 10)
    cases = list(itertools.product(tables.models(), GPUS, MODES))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for mine in pool.map(lambda case: simulated(*case), cases):
            tried += [layout for layout, _ in mine]
            print(line(*mine[-1]), flush=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*KEYS, "bytes", *KINDS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(layout.row() for layout in tried)


def simulated(model: str, gpus: int, attention: str) -> list[tuple[Tried, Fit]]:
    """Return the simulated layouts in the launcher's order; the last one fits."""
    config = configured(model, gpus, MODES[attention])
    types = dict(config.quantization.types or {})
    machine, project = imagined(DEVICE, PER_NODE), Project.here()
    series = Series.of_project(project)
    tried: list[tuple[Tried, Fit]] = []

    def measure(job: Workload, layout: Layout) -> Fit:
        computed = compute(job, layout)
        if computed.need > FAR * job.limit:
            return computed
        placed = config.with_layout(layout.flags(job.dtype))
        print(f"{model}, {gpus} GPUs, {attention}: {layout}", file=sys.stderr, flush=True)
        imbalance = UNEVEN if layout.expert > 1 else 1.0
        run = jobs.RunJob.from_config(placed, machine, types, imbalance)
        ranks = jobs.simulate(project, Tree(project.tree), series, run, lambda text: None)
        result = Simulation(placed, DEVICE, str(layout), imbalance, tuple(ranks))
        tried.append((Tried(attention, layout, result), computed))
        return Fit(layout, result.worst.stage, computed.memory, result.need, is_simulated=True)

    def divides(layout: Layout) -> bool:
        try:
            check_layout(config.with_layout(layout.flags(config.experiment.dtype)))
        except LayoutError:
            return False
        return True

    choose(workload_of(config, machine, types), divides, measure=measure)
    return tried


def configured(model: str, gpus: int, mode: str) -> RunConfig:
    """Return the standard configuration, with a global batch that feeds all GPUs."""
    cluster = Cluster(nnodes=gpus // PER_NODE, nproc_per_node=PER_NODE)
    flags = ("--global-batch-size", str(gpus)) if gpus > 128 else ()
    return resolve(model, "wikipedia", mode, "standard", cluster=cluster, extra_flags=flags)


def line(tried: Tried, computed: Fit) -> str:
    """Return the printed row of a chosen layout: memory in GiB, and seconds at peak rates."""
    result = tried.result
    bound = result.roofline(result.slowest)
    model = result.config.experiment.model.name
    seconds = (bound.products.seconds, bound.others.seconds, bound.exchanging)
    step = f"{bound.overlapped:.2f} to {bound.serial:.2f}"
    cells = [model, tried.layout.gpus, tried.attention, result.layout]
    cells += [f"{computed.need / GIB:.1f}", f"{result.need / GIB:.1f}"]
    cells += [f"{value:.2f}" for value in seconds] + [step]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
