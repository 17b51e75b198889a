"""Plan the runs of a performance test, and train them one after the other."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mqo.display import Say
from mqo.errors import LayoutError, MqoError
from mqo.launch import hybrid
from mqo.launch.config import Cluster, RunConfig, resolve
from mqo.launch.flags import length
from mqo.launch.hybrid import ModelClass
from mqo.launch.machine import THREADS, Machine
from mqo.launch.own_data import NO_DATA, OwnData, text_words
from mqo.launch.plugins import split_option
from mqo.launch.prepare import check_config
from mqo.launch.run import run
from mqo.launch.variants import FORWARD, GemmChoice, Variant
from mqo.matrix import layer_pattern, tables
from mqo.perf.comparability import profiler_flags, run_of
from mqo.project import Project
from mqo.quant.own_formats import OWN, users_file
from mqo.report.collect import Run
from mqo.runs import RunFolder

SCALING_STEPS = 12  # of the two scaling runs
LEAST = 2


@dataclass(frozen=True)
class PerfOptions:
    """The options of a test: a mode and its baseline, over the first `steps` of a training."""

    model: str
    mode: Variant
    baseline: Variant
    dataset: str
    config: str
    gemms: GemmChoice = FORWARD
    flags: tuple[str, ...] = ()
    steps: int = 50
    data: OwnData = NO_DATA
    shrink: tuple[int, int] | None = None
    model_class: ModelClass | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return the options for perf.json, with the names of mode and baseline."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["data"]  # the runs record it
        names = {"mode": self.mode.name, "baseline": self.baseline.name}
        return values | self.gemms.fields | names

    def planned(
        self, name: str, variant: Variant, *flags: str, threads: int | None = None, **rest: Any
    ) -> PerfRun:
        """Return a planned run with the configuration of `config_of`."""
        return PerfRun(name, self.config_of(variant, *flags, **rest), variant, threads)

    def config_of(
        self, variant: Variant, *flags: str, steps: int, save: bool = False, processes: int = 1
    ) -> RunConfig:
        """Return the configuration of a run of at most `steps` steps."""
        more: dict[str, Any] = {**self.gemms.fields, "extra_flags": (*self.flags, *flags)}
        more |= {"shrink": self.shrink, "model_class": self.model_class}
        more |= {**self.data.fields, **variant.rest}
        cluster = Cluster(nproc_per_node=processes)
        names = (self.model, self.dataset, variant.mode, self.config)
        config = resolve(*names, cluster=cluster, **more)
        last = min(steps, length(config.experiment).steps)
        saved = {"save_interval": last if save else 0}
        training = config.experiment.training.model_copy(update=saved)
        extra = (*config.experiment.extra_flags, "--exit-interval", str(last))
        return config.changed("experiment", training=training, extra_flags=extra)


@dataclass(frozen=True)
class PerfRun:
    """A planned run; `threads` are per process, None for the launcher's default."""

    name: str
    config: RunConfig
    variant: Variant
    threads: int | None = None

    def command(self) -> str:
        """Return a shell command that trains the same."""
        experiment, quantization = self.config.experiment, self.config.quantization
        words = ["mqo", "train", "--model", str(experiment.model_file or experiment.model.name)]
        if experiment.shrink:
            words += ["--shrink", "{},{}".format(*experiment.shrink)]
        words += [hybrid.OPTION, experiment.model_class] if experiment.model_class else []
        words += ["--dataset", experiment.dataset.name, *self.variant.words]
        chosen = GemmChoice(quantization.gemms, quantization.attention_gemms)
        words += [] if quantization.recipe else chosen.words
        words += [*_format_words(self.config), *_plugin_words(self.config, self.variant)]
        words += text_words(experiment)
        words += ["--training-config", experiment.training.name]
        processes = self.config.placement.cluster.nproc_per_node
        # At full size the launcher's default is all GPUs.
        sets_processes = processes > 1 or not experiment.training.is_smoke
        words += ["--nproc-per-node", str(processes)] if sets_processes else []
        before = f"{THREADS}={self.threads} " if self.threads else ""
        pattern = experiment.layer_pattern
        layers = [f"{layer_pattern.FLAG}={pattern}"] if pattern else []
        return before + shlex.join([*words, "--", *layers, *experiment.extra_flags])


def _format_words(config: RunConfig) -> Iterator[str]:
    """Yield the flags of the files whose formats a run uses."""
    for file in dict.fromkeys(OWN[name].file for name in config.quantization.formats):
        if file is not None and file != users_file():
            yield from ("--formats", str(file))


def _plugin_words(config: RunConfig, variant: Variant) -> Iterator[str]:
    """Yield the flags of the quantizers that a run uses, without those of its recipe."""
    quant = config.quantization
    own = {*map(Path, quant.recipe.plugins)} if quant.recipe else set()
    for file in dict.fromkeys(plugin.source for plugin in quant.plugins):
        if file not in own:
            yield from ("--plugin", str(file))
    for text in variant.rest.get("plugin_options", ()):
        if split_option(text)[0] in quant.all_types and text not in variant.words:
            yield from ("--plugin-option", text)


@dataclass(frozen=True)
class PerfPlan:
    """The runs: baseline, mode, mode `again` with a profiler, and `scaling`.

    `scaling` is one run with one process and one with two, or empty for the reason `unscaled`.
    """

    baseline: PerfRun
    mode: PerfRun
    again: PerfRun
    scaling: tuple[PerfRun, ...]
    unscaled: str = ""

    @property
    def runs(self) -> tuple[PerfRun, ...]:
        """Return all runs, in their order."""
        return self.baseline, self.mode, self.again, *self.scaling


def plan(options: PerfOptions, machine: Machine, *, scaling: bool = True) -> PerfPlan:
    """Return the plan; MqoError if a run is not possible, UnknownNameError for a name."""
    runs = {
        "baseline": options.planned("baseline", options.baseline, steps=options.steps, save=True),
        "mode": options.planned("mode", options.mode, steps=options.steps, save=True),
    }
    steps = min(options.steps, length(runs["mode"].config.experiment).steps)
    if steps < LEAST:
        raise MqoError(
            f"The training has {steps} step", expected=f"at least {LEAST} steps, one to profile"
        )
    flags = profiler_flags(steps)
    runs["again"] = options.planned("again", options.mode, *flags, steps=options.steps, save=True)
    for planned in runs.values():
        check_config(planned.config)
    pair, reason = _scaling(options, machine) if scaling else ((), "--no-scaling was given")
    return PerfPlan(**runs, scaling=pair, unscaled=reason)


def _scaling(options: PerfOptions, machine: Machine) -> tuple[tuple[PerfRun, ...], str]:
    """Return runs with one and two processes of the same batch and threads; or () and why not."""
    places = machine.gpus if machine.has_cuda else machine.cores
    if places < 2:
        return (), f"the machine has one {'GPU' if machine.has_cuda else 'core'}"
    threads = None if machine.has_cuda else machine.cores // 2
    micro = tables.pick(tables.trainings(), "training configuration", options.config).micro_batch
    flags = ("--micro-batch-size", str(max(1, micro // 2)))
    pair = tuple(
        options.planned(
            name, options.mode, *flags, steps=SCALING_STEPS, processes=processes, threads=threads
        )
        for name, processes in (("one_process", 1), ("two_processes", 2))
    )
    try:
        for planned in pair:
            check_config(planned.config)
    except LayoutError as error:
        return (), str(error)
    return pair, ""


def train(project: Project, runs: Sequence[PerfRun], root: Path, report: Say) -> dict[str, Run]:
    """Train each run in a subfolder of `root`; RunError if one fails."""
    done = {}
    for n, planned in enumerate(runs, 1):
        report(f"run {n}/{len(runs)}  : {planned.name}")
        folder = RunFolder(root / planned.name)
        folder.root.mkdir(parents=True)
        with _threads(planned.threads):
            run(project, planned.config, report=report, folder=folder)
        done[planned.name] = run_of(folder.root)
    return done


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the threads of a process in the environment, where the launcher reads them."""
    before = os.environ.get(THREADS)
    if count is not None:
        os.environ[THREADS] = str(count)
    try:
        yield
    finally:
        if count is not None:
            os.environ.pop(THREADS)
            os.environ |= {THREADS: before} if before is not None else {}
