"""Simulate the run of a training script on a device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mqo.display import Say
from mqo.errors import MqoError
from mqo.launch import arguments as command_line
from mqo.launch.config import RunConfig
from mqo.launch.machine import imagined
from mqo.launch.plan import layout_of, plan_layout
from mqo.launch.prepare import check_distillation
from mqo.launch.source import ready_checkout, types_of
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.simulate.jobs import RunJob, simulate
from mqo.simulate.result import Simulation
from mqo.simulate.script import arguments

# These depend on the lengths of documents, which are data.
_NOT_SIMULATED = ("--dataloader-inter-document-masking", "--sft", "--reset-attention-mask")
_PROCESSES = re.compile(r"--(nnodes|node-rank|device)\b")


@dataclass(frozen=True)
class SimulationOptions:
    """A script with its arguments and Megatron's, on `nodes` nodes of a device."""

    script: Path
    words: tuple[str, ...]
    megatrons: tuple[str, ...]
    device: str
    nodes: int
    imbalance: float


def simulated(options: SimulationOptions, tree: Tree, say: Say) -> Simulation:
    """Simulate the run of a script.

    Raises:
        MqoError: the script would refuse its arguments before it trains.
    """
    words, of_attention = arguments(options.script)
    own = [*words, *options.words]
    if strange := next(filter(_PROCESSES.match, own), None):
        raise MqoError(
            f"The script's arguments contain {strange}", expected="--nodes and --device instead"
        )
    args = command_line.parser(of_attention).parse_intermixed_args(
        [*own, "--nnodes", str(options.nodes)]
    )
    args.nproc_per_node = args.nproc_per_node or command_line.GPUS_PER_NODE
    machine = imagined(options.device, args.nproc_per_node)
    config = command_line.config_from(args, list(options.megatrons), machine)
    _refuse(config)
    if config.placement.megatron:
        tree = ready_checkout(config, config.placement.megatron, allow_edits=True)
    project = Project.here()
    types = dict(config.quantization.types or types_of(tree))
    planned = plan_layout(project.tree, config, machine, types)
    layout = layout_of(
        [*planned.config.placement.layout, *planned.config.experiment.extra_flags],
        planned.config.placement.cluster.processes,
    )
    job = RunJob.from_config(planned.config, machine, types, options.imbalance)
    ranks = simulate(project, tree, Series.of_project(project), job, say)
    return Simulation(planned.config, options.device, str(layout), options.imbalance, tuple(ranks))


def _refuse(config: RunConfig) -> None:
    """Raise MqoError for a configuration that runs or simulations do not support."""
    check_distillation(config.experiment, config.placement.megatron)
    flags = config.experiment.extra_flags
    if strange := next((word for word in flags if word.startswith(_NOT_SIMULATED)), None):
        raise MqoError(f"{strange} cannot be simulated", expected="sequences of one document each")
