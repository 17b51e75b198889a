"""Computes a layout and a GPU's memory for each model on 8 and on 64 GPUs of 80 GB.

    .venv/bin/python benchmarks/scale.py

Modes are those of the types that have scripts. Nothing is run at that size. mqo.scale says how it
is computed; what it says of the weights is held here against upstream's own model, built on the
meta device as one rank of the planned job, and its sums against upstream's own estimate. Ends with
an error where the weights are not the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from mqo.launch.config import Cluster, Experiment, resolve
from mqo.launch.machine import imagined
from mqo.launch.plan import layout_of, meta_job, with_layout
from mqo.matrix import tables
from mqo.matrix.tables import Mode
from mqo.project import Project
from mqo.scale.devices import GIB
from mqo.scale.layout import Layout
from mqo.scale.memory import Arithmetic, Memory, worst_stage
from mqo.scale.weights import rank_weights

DEVICE, PER_NODE = "h100-80gb", 8
GPUS = (8, 64)
# What is no part of the total stands last.
PARTS = [field.name for field in fields(Memory)][:-2]
BESIDE = ("total", "cache", "packed")
# Modes of the types that have scripts: those of others differ in `packed` alone.
SHOWN = [
    name
    for name, mode in tables.modes().items()
    if {mode.linear, mode.qk, mode.pv} <= {*tables.SCRIPT_TYPES}
]
LAYOUT = "TP | PP | EP | DP | recompute | micro-batches"


@dataclass(frozen=True)
class Plan:
    """What the launcher plans for a run, with the memory of a GPU of the worst stage."""

    of: Experiment
    mode: Mode
    layout: Layout
    stage: int
    memory: Memory

    @property
    def micro_batches(self) -> int:
        """Return those of a rank, in a step."""
        training = self.of.training
        return training.global_batch // (training.micro_batch * self.layout.data)


def plan(model: str, mode: str, gpus: int) -> Plan:
    """Plan the standard configuration."""
    cluster = Cluster(nnodes=gpus // PER_NODE, nproc_per_node=PER_NODE)
    config = resolve(model, "wikipedia", mode, "standard", cluster=cluster)
    types, of = config.quantization.types, config.experiment
    assert types is not None
    planned = with_layout(config, imagined(DEVICE, PER_NODE), types).config
    layout, row = layout_of(planned.placement.layout, gpus), tables.modes()[mode]
    stage, memory = worst_stage(of.model, of.training, Arithmetic.of(row), layout)
    return Plan(of, row, layout, stage, memory)


def main() -> None:
    """Print both tables."""
    print(f"| model | GPUs | modes | {LAYOUT} | {' | '.join((*PARTS, *BESIDE))} |")
    print("|" + "---|" * (3 + 6 + len(PARTS) + len(BESIDE)))
    for name in tables.models():
        for gpus in GPUS:
            for plans in groups(name, gpus):
                print(memory_row(plans))
    print()
    sums = "ours GB | upstream's GB"
    print(f"| model | GPUs | weights of a rank | built | states: {sums} | activations: {sums} |")
    print("|" + "---|" * 8)
    for row in check_rows([plan(name, "bf16", gpus) for name in tables.models() for gpus in GPUS]):
        print(row)


def groups(model: str, gpus: int) -> list[list[Plan]]:
    """Group the plans of all modes by layout and memory, `packed` apart."""
    found: dict[tuple[Layout, Memory], list[Plan]] = {}
    for mode in SHOWN:
        made = plan(model, mode, gpus)
        found.setdefault((made.layout, replace(made.memory, packed=0)), []).append(made)
    return list(found.values())


def families(modes: list[str]) -> str:
    """Name the modes, the quant types in their names as X, each once."""
    short = {f.mode(name): f.mode("X") for f in tables.families() for name in f.types}
    named = [short[mode] for mode in modes]
    return " ".join(f"`{name}`" for name in dict.fromkeys(named))


def memory_row(plans: list[Plan]) -> str:
    """Return plans that differ in `packed` alone, in GiB; `packed` of each type."""
    made = plans[0]
    one, memory = made.layout, made.memory
    sizes = (one.tensor, one.pipeline, one.expert, one.data, one.recompute, made.micro_batches)
    parts = [f"{getattr(memory, part) / GIB:.1f}" for part in (*PARTS, *BESIDE[:-1])]
    packed = {each.mode.linear: each.memory.packed for each in plans}
    parts.append(" / ".join(f"{less / GIB:.1f}" for less in packed.values()))
    modes = families([each.mode.name for each in plans])
    words = [made.of.model.name, one.gpus, modes, *sizes, *parts]
    return f"| {' | '.join(map(str, words))} |"


def check_rows(plans: list[Plan]) -> Iterator[str]:
    """Return ours beside upstream's, for a rank of the worst stage of each plan."""
    jobs = [meta_job(p.of, p.layout, p.stage * p.layout.gpus // p.layout.pipeline) for p in plans]
    program = Path(__file__).with_name("rank_weights.py")
    command = [sys.executable, "-I", "-W", "ignore", program, Project.here().tree]
    done = subprocess.run(command, input=json.dumps(jobs), stdout=subprocess.PIPE, text=True)
    for made, theirs in zip(plans, json.loads(done.stdout), strict=True):
        memory = made.memory
        ours = rank_weights(made.of.model, made.layout, made.stage)
        built = theirs["dense"] + theirs["expert"]
        if (ours.dense, ours.expert) != (theirs["dense"], theirs["expert"]):
            raise SystemExit(f"{made.of.model.name}: {ours}, and built {theirs}")
        states = memory.weights + memory.gradients + memory.optimizer
        activations = memory.activations + memory.logits
        sums = (states, theirs["static_bytes"], activations, theirs["activation_bytes"])
        counts = f"{ours.dense + ours.expert:,} | {built:,}"
        gigabytes = " | ".join(f"{number / 1e9:.2f}" for number in sums)
        yield f"| {made.of.model.name} | {made.layout.gpus} | {counts} | {gigabytes} |"


if __name__ == "__main__":
    main()
