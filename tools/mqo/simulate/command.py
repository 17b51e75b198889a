"""Simulate the run of a training script on a device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from mqo.display import Say
from mqo.errors import MqoError
from mqo.launch import arguments as command_line
from mqo.launch.config import Quantization, RunConfig
from mqo.launch.machine import Machine, imagined
from mqo.launch.plan import layout_of, plan_layout, workload_of
from mqo.launch.prepare import check_distillation
from mqo.launch.source import ready_checkout, types_of
from mqo.matrix.tables import NONE, UNQUANTIZED
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.quant.formats import ATTENTION, ATTENTION_BACKWARD, SITES
from mqo.scale.layout import Layout
from mqo.scale.memory import BF16, WIDTH
from mqo.simulate.jobs import RunJob, simulate
from mqo.simulate.native import NativeEstimate, check_formats, formats_of
from mqo.simulate.result import Simulation
from mqo.simulate.script import arguments

# These depend on the lengths of documents, which are data.
_NOT_SIMULATED = ("--dataloader-inter-document-masking", "--sft", "--reset-attention-mask")
OLDEST = (0, 19)
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


@dataclass(frozen=True)
class PreparedRun:
    """A run whose layout is known, on a machine; `types` are the quant types in its source."""

    config: RunConfig
    types: dict[str, str]
    layout: Layout
    machine: Machine
    options: SimulationOptions
    project: Project
    tree: Tree

    def simulate(self, say: Say) -> Simulation:
        """Simulate the run."""
        imbalance, device = self.options.imbalance, self.options.device
        job = RunJob.from_config(self.config, self.machine, self.types, imbalance)
        series = Series.of_project(self.project)
        ranks = simulate(self.project, self.tree, series, job, say)
        return Simulation(self.config, device, str(self.layout), imbalance, tuple(ranks))

    def unquantized(self) -> PreparedRun:
        """Return the same run without quantization, in the same layout."""
        types = dict.fromkeys(SITES, NONE)
        return self._quantized(Quantization(mode=UNQUANTIZED, types=types), types)

    def linear_only(self) -> PreparedRun:
        """Return the same run without types in attention, so that attention is fused."""
        none = {site.name: NONE for site in SITES.values() if site.layer == ATTENTION}
        types = self.types | none
        return self._quantized(self.config.quantization.model_copy(update={"types": types}), types)

    def _quantized(self, quantization: Quantization, types: dict[str, str]) -> PreparedRun:
        config = self.config.model_copy(update={"quantization": quantization})
        return replace(self, config=config, types=types)


def estimated(options: SimulationOptions, tree: Tree, say: Say) -> NativeEstimate:
    """Estimate the run of a script on a device that computes in its formats.

    Raises:
        MqoError: as `prepared`, or the device has no GEMMs in a format of the run.
    """
    run = prepared(options, tree)
    if WIDTH[run.config.experiment.dtype] != BF16:
        raise MqoError(
            f"The run trains in {run.config.experiment.dtype}",
            expected="bf16 or fp16 for --native",
            help="Use --training-config standard, which trains in bf16",
        )
    if backward := [s for s in ATTENTION_BACKWARD if run.types.get(s, NONE) != NONE]:
        raise MqoError(
            f"The run quantizes products of attention's backward pass: {', '.join(backward)}",
            expected="type 'none' for them: --native estimates no kernel that quantizes them",
            help="Run `mqo simulate` without --native",
        )
    check_formats(formats_of(run.types.values()), options.device)
    base, mode = run.unquantized().simulate(say), run.linear_only().simulate(say)
    work = workload_of(run.config, run.machine, run.types)
    estimate = NativeEstimate(run.config, base, mode.ranks, run.types, work, run.layout)
    check_formats(estimate.formats, options.device)
    return estimate


def prepared(options: SimulationOptions, tree: Tree) -> PreparedRun:
    """Return the run of a script, ready to simulate.

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
    check_release(tree)
    project = Project.here()
    types = dict(config.quantization.types or types_of(tree))
    config, _ = plan_layout(project.tree, config.using(types), machine, types)
    placement = config.placement
    flags = [*placement.layout, *config.experiment.extra_flags]
    layout = layout_of(flags, placement.cluster.processes)
    return PreparedRun(config, types, layout, machine, options, project, tree)


def check_release(tree: Tree) -> None:
    """Raise MqoError for a checkout whose trainer takes no configuration, as simulations need."""
    if tree.is_checkout and Version(version := tree.upstream().version).release < OLDEST:
        raise MqoError(
            f"{tree.root} is Megatron {version}",
            expected=f"{'.'.join(map(str, OLDEST))} or newer, whose trainer can be simulated",
            help="Without --tree and --megatron, the pinned release is simulated",
        )


def _refuse(config: RunConfig) -> None:
    """Raise MqoError for a configuration that runs or simulations do not support."""
    check_distillation(config.experiment, config.placement.megatron)
    if plugins := config.quantization.plugins:
        raise MqoError(
            f"{plugins[0].name} is a quantizer in Python, whose operations cannot be simulated",
            expected="types of mqo",
        )
    flags = config.experiment.extra_flags
    if strange := next((word for word in flags if word.startswith(_NOT_SIMULATED)), None):
        raise MqoError(f"{strange} cannot be simulated", expected="sequences of one document each")
