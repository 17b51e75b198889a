"""Run a configuration: prepare, copy the source, train in a subprocess, write the result."""

from __future__ import annotations

import codecs
import json
import math
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

from pydantic import FiniteFloat

from mqo.data.prepare import layout
from mqo.display import Display, Say
from mqo.errors import RunError, full_disk_of
from mqo.launch import coverage
from mqo.launch.checkpoint_lock import CheckpointLock, LockLostError, check_free, locked
from mqo.launch.checks import check_run, validated_variables
from mqo.launch.config import Cluster, Experiment, RunConfig, num_layers
from mqo.launch.events import copy_events
from mqo.launch.failure import Ended, reason
from mqo.launch.finished import note_finished, started_from
from mqo.launch.flags import RunData, length, megatron_flags, save_folder
from mqo.launch.folder import create, write_facts
from mqo.launch.libraries import library_labels, modelopt_quantization
from mqo.launch.machine import THREADS, Machine, detect, threads
from mqo.launch.options import ENVIRONMENT_VARIABLE
from mqo.launch.origin import sign
from mqo.launch.plan import plan_layout
from mqo.launch.plugins import copy_files
from mqo.launch.prepare import check_config, has_sample, note_checkpoint, ready_data, ready_tree
from mqo.launch.progress import Progress, loss_name
from mqo.launch.source import program_of, ready_checkout, take_source, types_of
from mqo.launch.start_weights import ready_weights
from mqo.matrix.tables import NONE, SITES
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.process import end, end_left, leaves_on_signal, started, temporary_folder
from mqo.project import Project
from mqo.quant.own_formats import VERSION
from mqo.recipes.show import kept_out
from mqo.run_records import RunEnd, parsed
from mqo.runs import VALID_LOSS, RunFolder
from mqo.track.live import News, following

_WARNING = "mqo: warning: "  # marks output that is for the user, not only for the log
_ON_CPU = {
    # glibc returns a freed large tensor to the system, and getting the next one page by page takes
    # longer than filling it. So keep the memory: every step needs the same amount.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # On a busy machine, threads that spin while they wait take the core of the awaited one.
    "OMP_WAIT_POLICY": "PASSIVE",
}


TORCHRUN = "torch.distributed.run"
# Variables that torchrun sets for a worker. One process needs no torchrun, which takes two seconds
# to start. With port 0 the process opens a free port, which no other process needs.
_ALONE = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
}


@dataclass(frozen=True)
class Result:
    """The result of a run, as saved in result.json.

    Losses are in nats per token; `seconds` is the lifetime of the training process.

    `valid_loss` is that of the final validation, after the last step. Of several nodes only the
    last one knows the losses. `train_loss` is None if an earlier run trained the last step. `types`
    are the types in the source, with which the run begins, and formats of other libraries, by
    library; `schedule` changes some of them. `formats` are the digests of the user's formats.
    """

    run: str
    iterations: int
    train_loss: float | None
    valid_loss: float | None
    vocab_size: int | None
    seconds: FiniteFloat
    types: dict[str, str]
    schedule: tuple[str, ...] = ()
    formats: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Return the line to print."""
        if self.train_loss is None and not self.iterations:
            return f"trained in {self.seconds:.0f} s; the last node has the losses"
        kinds = {"validation": self.valid_loss, "training": self.train_loss}
        losses = [f"{kind} loss {loss:.4f}" for kind, loss in kinds.items() if loss is not None]
        chance = f" (chance: {math.log(self.vocab_size):.2f})" if losses and self.vocab_size else ""
        earlier = " of an earlier run" if self.train_loss is None else ""
        sites = " ".join(f"{s}={self.types[s]}" for s in SITES if self.types.get(s, NONE) != NONE)
        own = [f"{name} is {digest[:VERSION]}" for name, digest in self.formats.items()]
        parts = (sites, *library_labels(self.types), *self.schedule, *own)
        quantized = ", ".join(filter(None, parts))
        return (
            f"{', '.join(losses) or 'no losses'}{chance} after {self.iterations} steps{earlier} "
            f"in {self.seconds:.0f} s; {quantized or 'nothing quantized'}"
        )


def run(
    project: Project,
    config: RunConfig,
    *,
    allow_edits: bool = False,
    report: Say = print,
    folder: RunFolder | None = None,
    tracker: str | None = None,
    take_lock: bool = False,
) -> Result:
    """Train in a new run folder, or in `folder`; RunError if training fails.

    `folder` exists, and has no files of a run. A `tracker` follows the training. `take_lock` takes
    CHECKPOINT even from a run that seems to save there.
    """
    series, machine = Series.of_project(project), detect()
    check_config(config, machine)
    if not take_lock:
        check_checkpoint(project, config)
    types, megatron = config.quantization.types, config.placement.megatron
    if megatron is None:
        tree = ready_tree(project, series, report, allow_edits=allow_edits)
    else:
        tree = ready_checkout(config, megatron, allow_edits=allow_edits)
        report(f"megatron : {tree.root}")
    config = with_checkpoint_library(project, config)
    for library in config.quantization.libraries:
        report(f"library  : {library.label}")
    if types is None:
        types = types_of(tree)
        config = config.using(types)
    config, lines = plan_layout(project.tree, config, machine, types)
    for line in lines:
        report(f"layout   : {line}")
    if megatron is None:  # else its own program reads the flags
        for note in check_run(project, tree, series, config, machine, types):
            report(f"note     : {note}")
    data = ready_data(project, config.experiment, report)
    ready_weights(config.experiment, tree.root, report)
    note_checkpoint(config.experiment, report)
    run_folder = folder or create(project.runs, config.title)
    saves, where = save_folder(config, run_folder), config.placement.cluster
    try:
        with (
            full_disk_of(run_folder.root),
            locked(saves, run_folder.root, where, report, take=take_lock) as lock,
        ):
            source, types = _take_source(run_folder, tree, series, config, report)
            command, env = build_command(project, config, machine, run_folder, data, source)
            write_facts(run_folder, config, command, env)
            sign(project, run_folder)
            if megatron is None:  # else the source may not run our program
                coverage.record(project, run_folder, config, data, report)
            return train(run_folder, config, command, env, data, types, report, tracker, lock)
    finally:
        if folder is None:
            with suppress(OSError):
                run_folder.root.rmdir()  # if nothing was written: the lock was refused


def _take_source(
    folder: RunFolder, tree: Tree, series: Series, config: RunConfig, report: Say
) -> tuple[Path, dict[str, str]]:
    """Write the run's source and quant.toml into the folder.

    Returns:
        The root of the source, and the types of the run by site or library.
    """
    quant = config.quantization
    shot = take_source(folder, tree, series, config)
    if dict(shot.types) != dict(shot.shared_types) and set(shot.shared_types.values()) != {"none"}:
        report(f"note     : {tree.root} has {_types(shot.shared_types)}; this run uses its own")
    report(f"source   : {_types(shot.types)}")
    if quant.recipe is not None:
        report(f"recipe   : {kept_out(quant.recipe, num_layers(config.experiment))}")
    for name, row in quant.formats.items():
        report(f"format   : {name}, {row.version}")
    copy_files(quant.plugins, folder)
    for plugin in quant.plugins:
        report(f"plugin   : {plugin.name} of {plugin.source}, {plugin.label}")
    options = config.quant_toml(dict(quant.types or shot.types))
    folder.quant_config.write_text(options, encoding="utf-8")
    return shot.tree.root, dict(shot.types) | quant.library_types


def check_checkpoint(project: Project, config: RunConfig) -> None:
    """Raise RunError if another run saves where this one would."""
    folder = RunFolder(project.runs / config.title)
    check_free(save_folder(config, folder), config.placement.cluster)


def with_checkpoint_library(project: Project, config: RunConfig) -> RunConfig:
    """Return the configuration with what ModelOpt quantizes in the checkpoint to load."""
    experiment = config.experiment
    library = modelopt_quantization(project.tree, experiment.checkpoint, experiment.extra_flags)
    return config.with_library(library) if library else config


def train(
    folder: RunFolder,
    config: RunConfig,
    command: list[str],
    env: dict[str, str],
    data: RunData,
    types: dict[str, str],
    report: Say,
    tracker: str | None = None,
    lock: CheckpointLock | None = None,
) -> Result:
    """Run the command in its prepared folder, and write the result; RunError if training fails."""
    report(f"run      : {folder.root}")
    begun, epoch, where = time.monotonic(), time.time(), config.placement.cluster
    if where.node_rank < where.nnodes - 1:
        tracker = None  # the last node has the metrics
    with following(folder, tracker, report) as news:
        with full_disk_of(folder.root):
            _train(folder, command, env, config, report, news, lock)
        if taken := folder.read_implementation():
            report(f"ran with : {'; '.join(f'{kind} {names}' for kind, names in taken.items())}")
        if not folder.metrics.exists():
            copy_events(config.recording.tensorboard or folder.tensorboard, folder, epoch)
        result = _sum_up(folder, config, data, types, time.monotonic() - begun)
        folder.result.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
        note_finished(folder, config, command)
    return result


def build_command(
    project: Project,
    config: RunConfig,
    machine: Machine,
    folder: RunFolder,
    data: RunData,
    source: Path,
) -> tuple[list[str], dict[str, str]]:
    """Return the training command, which runs the program in `source`, and its variables."""
    where = config.placement.cluster
    flags = megatron_flags(config, machine, data, folder, project.cache / "indices")
    program = str(source / program_of(config))
    alone = where.nnodes == where.nproc_per_node == 1
    start = [sys.executable, "-u"] if alone else _torchrun(where)
    share = max(1, machine.cores // max(1, where.nproc_per_node))
    env = {
        **(_ALONE if alone else {}),
        ENVIRONMENT_VARIABLE: str(folder.quant_config),
        **validated_variables(config.experiment.extra_flags),
        THREADS: threads(share),
        # Everything a run reads is on disk; an unreachable hub must not delay it.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **project.compiled(),
    }
    if not machine.has_cuda:
        env |= {name: os.environ.get(name, value) for name, value in _ON_CPU.items()}
    return [*start, program, *flags], env


def dry_run(
    project: Project, config: RunConfig, machine: Machine, source: Path | None
) -> tuple[list[str], dict[str, str]]:
    """Return the command that `run` would start, in a folder not created yet, and its variables.

    Writes nothing. `source` is the tree to run, if that is not a snapshot.
    """
    folder = RunFolder(project.runs / f"TIME_{config.title}")
    data = RunData.given(config.experiment) or _sample(project, config.experiment)
    return build_command(project, config, machine, folder, data, source or folder.source)


def _sample(project: Project, experiment: Experiment) -> RunData:
    """Return the paths of a dataset's sample, or placeholders for data that the user must give."""
    if not has_sample(experiment):
        return RunData(Path("TOKENIZER"), Path("DATA_PREFIX"), None)
    folder = project.data / experiment.dataset.name
    folder = folder if folder.exists() else project.own_data / experiment.dataset.name
    _, tokenizer, prefix = layout(folder, experiment.dataset.name)
    return RunData(tokenizer, prefix, None)


def _torchrun(where: Cluster) -> list[str]:
    words = [sys.executable, "-m", TORCHRUN, "--nproc-per-node", str(where.nproc_per_node)]
    if where.nnodes == 1:
        return [*words, "--standalone"]
    words += ["--nnodes", str(where.nnodes), "--node-rank", str(where.node_rank)]
    words += ["--master-addr", where.master_addr]
    return words + (["--master-port", str(where.master_port)] if where.master_port else [])


def _train(
    folder: RunFolder,
    command: list[str],
    env: dict[str, str],
    config: RunConfig,
    report: Say,
    news: News,
    lock: CheckpointLock | None = None,
) -> None:
    """Run the command with its output in log.txt; report its progress and a tracker's `news`.

    Raises:
        LockLostError: another run took the lock; this one was killed, because it must not save.
        RunError: it failed; or a signal made it save and stop early, with the exit code
            os.EX_TEMPFAIL ("try again").
    """
    progress = Progress(config.experiment, folder.metrics)
    with (
        Display.around(report).live() as display,
        folder.log.open("w", encoding="utf-8") as log,
        leaves_on_signal() as leaving,
        temporary_folder("mqo-run-") as scratch,  # torchrun does not remove its folders
        started(
            command,
            env={**os.environ, **env, "TMPDIR": str(scratch)},
            cwd=folder.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        alone = TORCHRUN not in command
        leaving.watch(process, is_worker=alone)
        if lock is not None:
            lock.add(process.pid)
        for warnings in _logged(process, log):
            _keep(lock, process)
            for line in (*warnings, *progress.update(), *news()):
                display(line)
            display.show(progress.line())
        code = process.wait()
        if code != 0:
            end_left("TMPDIR", str(scratch))
    if code != 0:
        ended = Ended(0, process.pid, platform.node(), -code) if alone and code < 0 else None
        raise RunError(
            f"Training failed{_how_far(config, progress)}: {reason(folder, ended)}",
            help=f"The full output is in {folder.log}",
            exit_code=code if code > 0 else 128 - code,
        )
    if leaving.was_asked and not folder.ended.exists():
        raise RunError(
            "Training was stopped by a signal, after it saved",
            help="The same command, with a CHECKPOINT, continues from there",
            exit_code=os.EX_TEMPFAIL,
        )


def _keep(lock: CheckpointLock | None, process: subprocess.Popen) -> None:
    """Keep the lock; kill the training if it is lost: a terminated one would save again."""
    try:
        if lock is not None:
            lock.beat()
    except LockLostError:
        end(process, grace=0)
        raise


def _how_far(config: RunConfig, progress: Progress) -> str:
    """Return a clause with the number of trained steps; '' on all nodes but the last."""
    where = config.placement.cluster
    if where.node_rank < where.nnodes - 1:
        return ""
    _, before = started_from(config.experiment)
    return f" after {max(progress.step, before or 0)} of {progress.steps} steps"


def _logged(process: subprocess.Popen, log: TextIO) -> Iterator[list[str]]:
    """Copy the process's output to its log; yield its warnings, at least once per second."""
    rest = ""
    for text in _output(process):
        log.write(text)
        log.flush()
        *lines, rest = (rest + text).split("\n")
        ours = [line.removeprefix(_WARNING) for line in lines if line.startswith(_WARNING)]
        yield [f"warning  : {line.strip()}" for line in ours]


def _output(process: subprocess.Popen) -> Iterator[str]:
    """Yield the process's output as it is printed, and '' after each second without output.

    Stop when it has ended, because processes of a killed worker may keep the output open.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    assert process.stdout is not None  # it was started with a pipe
    ended = False
    while True:
        chunk = b""
        if select.select([process.stdout], [], [], 0 if ended else 1)[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                break
        elif ended:
            break
        ended = process.poll() is not None
        yield decode(chunk)
    yield decode(b"", final=True)


def _sum_up(
    folder: RunFolder, config: RunConfig, data: RunData, types: dict[str, str], seconds: float
) -> Result:
    metrics, name = folder.read_metrics(), loss_name(config.experiment)
    validations = metrics.get(VALID_LOSS, [])
    valid = validations[-1][1] if validations else None
    ended = partial(
        Result,
        str(folder.root),
        vocab_size=data.vocab_size,
        seconds=seconds,
        types=types,
        schedule=config.quantization.schedule,
        formats={name: row.digest for name, row in config.quantization.formats.items()},
    )
    if name not in metrics:
        where = config.placement.cluster
        if where.node_rank < where.nnodes - 1:
            return ended(0, train_loss=None, valid_loss=None)
        if (step := _trained_before(folder, config)) is not None:
            return ended(step, train_loss=None, valid_loss=valid)
        raise RunError(
            "Training ended without an error, but recorded no loss",
            expected=f"rows named '{name}' in {folder.metrics}",
            help=f"The full output is in {folder.log}",
        )
    iteration, loss = metrics[name][-1]
    return ended(iteration, train_loss=loss, valid_loss=valid)


def _trained_before(folder: RunFolder, config: RunConfig) -> int | None:
    """Return the step of the checkpoint if nothing was left to train; None if the run trained.

    A checkout's own program writes no ended.json, so the checkpoint's step decides.
    """
    _, step = started_from(config.experiment)
    if folder.ended.exists():
        return step if parsed(folder.ended, RunEnd).steps == 0 else None
    return step if step is not None and step >= length(config.experiment).steps else None


def _types(types: Mapping[str, str]) -> str:
    return " ".join(f"{site}={value}" for site, value in types.items()) or "no quant sites"
