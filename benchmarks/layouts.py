"""Simulate the layouts that the launcher chooses from, and write tools/mqo/scale/simulated.csv.

    .venv/bin/python benchmarks/layouts.py > TABLE.md

For each model of the matrix on 8, 64 and 512 GPUs, with fused and with chunked attention, runs `mqo
simulate` on every layout in the launcher's order up to the first that fits an h100-80gb. Layouts
whose memory by the formulas exceeds the limit by more than a quarter are skipped. On 512 GPUs the
global batch is 512 sequences. Prints the chosen layouts as a table, with
the roofline of a step. Needs no GPU. The launcher reads the CSV: run this again after a change of
the simulation or of the models.
"""

import csv
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mqo.launch.config import Cluster, RunConfig, resolve
from mqo.launch.machine import imagined
from mqo.launch.plan import divides, workload_of
from mqo.matrix import tables
from mqo.megatron.simulation.rows import KINDS
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.scale.choose import Fit, Workload, choose, compute
from mqo.scale.devices import GIB
from mqo.scale.layout import Layout
from mqo.scale.memory import CONTEXT, UNEVEN
from mqo.scale.simulated import KEYS, TABLE, key_of
from mqo.simulate import jobs
from mqo.simulate.result import Simulation

DEVICE, PER_NODE = "h100-80gb", 8
GPUS = (8, 64, 512)
# {attention: a mode that uses it}; other modes with the same attention have the same peak.
MODES = {"fused": "FA_linear_mxfp8", "chunked": "qk_pv_mxfp8"}
SKIPPED_ABOVE = 1.25  # times the device's limit


@dataclass(frozen=True)
class SimulatedLayout:
    """A layout that was simulated."""

    job: Workload
    layout: Layout
    result: Simulation

    def row(self) -> dict[str, object]:
        """Return its row of the table."""
        job, need = self.job, self.result.need - CONTEXT
        key = key_of(job.model.name, job.training, job.arithmetic.attention, self.layout, job.dtype)
        return dict(zip(KEYS, key, strict=True)) | {"bytes": need, **self.result.worst.kinds}


def main() -> None:
    """Simulate all cases, write the table, and print the chosen layouts."""
    tried: list[SimulatedLayout] = []
    names = "layout | formulas, GiB | simulated, GiB | GEMMs, s | others, s | sent, s | step, s"
    print(f"| model | GPUs | attention | {names} |")
    print("|" + "---|" * 10)
    cases = list(itertools.product(tables.models(), GPUS, MODES))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for results in pool.map(lambda case: simulated(*case), cases):
            tried += [layout for layout, _ in results]
            print(line(*results[-1]), flush=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*KEYS, "bytes", *KINDS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(layout.row() for layout in tried)


def simulated(model: str, gpus: int, attention: str) -> list[tuple[SimulatedLayout, Fit]]:
    """Return the simulated layouts in the launcher's order; the last one fits."""
    config = configured(model, gpus, MODES[attention])
    types = dict(config.quantization.types or {})
    machine, project = imagined(DEVICE, PER_NODE), Project.here()
    series = Series.of_project(project)
    tried: list[tuple[SimulatedLayout, Fit]] = []

    def measure(job: Workload, layout: Layout) -> Fit:
        computed = compute(job, layout)
        if computed.need > SKIPPED_ABOVE * job.limit:
            return computed
        placed = config.with_layout(layout.flags(job.dtype))
        print(f"{model}, {gpus} GPUs, {attention}: {layout}", file=sys.stderr, flush=True)
        imbalance = UNEVEN if layout.expert > 1 else 1.0
        run = jobs.RunJob.from_config(placed, machine, types, imbalance)
        ranks = jobs.simulate(project, Tree(project.tree), series, run, lambda text: None)
        result = Simulation(placed, DEVICE, str(layout), imbalance, tuple(ranks))
        tried.append((SimulatedLayout(job, layout, result), computed))
        return Fit(layout, result.need, is_simulated=True)

    job = workload_of(config, machine, types)
    choose(job, lambda layout: divides(config, layout), measure=measure)
    return tried


def configured(model: str, gpus: int, mode: str) -> RunConfig:
    """Return the standard configuration, with a global batch that feeds all GPUs."""
    cluster = Cluster(nnodes=gpus // PER_NODE, nproc_per_node=PER_NODE)
    flags = ("--global-batch-size", str(gpus)) if gpus > 128 else ()
    return resolve(model, "wikipedia", mode, "standard", cluster=cluster, extra_flags=flags)


def line(tried: SimulatedLayout, computed: Fit) -> str:
    """Return the printed row of a chosen layout: memory in GiB, and seconds at peak rates."""
    result = tried.result
    bound = result.roofline(result.slowest)
    model = result.config.experiment.model.name
    seconds = (bound.products.seconds, bound.others.seconds, bound.exchanging)
    step = f"{bound.overlapped:.2f} to {bound.serial:.2f}"
    cells = [model, tried.layout.gpus, tried.job.arithmetic.attention, result.layout]
    cells += [f"{computed.need / GIB:.1f}", f"{result.need / GIB:.1f}"]
    cells += [f"{value:.2f}" for value in seconds] + [step]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
