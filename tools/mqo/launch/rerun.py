"""Replay a run from its folder, and compare the losses bit by bit."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mqo.display import Say
from mqo.errors import RunError
from mqo.launch.checkpoint_lock import locked
from mqo.launch.command import command_of, flag_table, flag_words, without_flag
from mqo.launch.config import RunConfig
from mqo.launch.flags import RunData
from mqo.launch.folder import Environment, create, loaded_packages, packages, write_facts
from mqo.launch.origin import foreign, is_own, sign
from mqo.launch.prepare import ready_data
from mqo.launch.run import Result, train
from mqo.launch.source import PROGRAM
from mqo.project import Project
from mqo.run_records import parsed
from mqo.runs import KD_LOSS, TRAIN_LOSS, VALID_LOSS, RunFolder, training_losses
from mqo.untrusted import copy_file, reading

LISTED = 6


@dataclass(frozen=True)
class BitEqual:
    """Each loss is the same to the last bit; `steps` is the number of steps of the original."""

    run: str
    steps: int

    def line(self) -> str:
        """Return the line to print."""
        return f"bit-equal, {self.steps} steps"


@dataclass(frozen=True)
class Differs:
    """The first loss that differs, in nats per token; None if a run lacks that step."""

    run: str
    metric: str
    step: int
    was: float | None
    now: float | None

    def line(self) -> str:
        """Return the line to print."""
        was, now = ("missing" if value is None else repr(value) for value in (self.was, self.now))
        return f"differs at step {self.step}: {self.metric} was {was}, and is {now}"


def rerun(
    project: Project,
    original: RunFolder,
    *,
    allow_versions: bool = False,
    trust: bool = False,
    report: Say = print,
) -> BitEqual | Differs:
    """Train again in a new run folder, from the original's source, quant.toml and command.

    Raises:
        RunError: the run is not this user's own (unless `trust`), its inputs changed, packages that
            it loaded have other versions (unless `allow_versions`), or training fails.
    """
    config, facts = _read(original)
    own = is_own(project, original)
    if not own and not trust:
        raise foreign(original)
    if config.experiment.text is not None:
        ready_data(project, config.experiment, report)  # it may have been deleted: it is a cache
    _check_inputs(config, facts)
    _check_versions(original, facts, allow_versions, report)
    command, env = command_of(original)
    folder = create(project.runs, f"{config.title}_rerun")
    copied = ("source", "plugins", "quant_config", "overlay_diff", "coverage", "coverage_table")
    for name in copied:
        _copy(getattr(original, name), getattr(folder, name))
    was = str(original.root.resolve())
    moved = [_moved(word, was, folder) for word in command]
    env = {name: _moved(value, was, folder) for name, value in env.items()}
    command = redirected(moved, folder, facts.inputs.iteration)
    write_facts(folder, config, command, env)
    if own:
        sign(project, folder)
    saves, where = flag_table(command).get("--save"), config.placement.cluster
    with locked(Path(saves) if saves else None, folder.root, where, report) as lock:
        result = train(folder, config, command, env, *_known(original), report, lock=lock)
    _note_additional(original, folder, report)
    return compare(original, RunFolder(Path(result.run)))


def compare(original: RunFolder, again: RunFolder) -> BitEqual | Differs:
    """Compare training and validation losses step by step, for all steps of the original."""
    old, new = original.read_metrics(), again.read_metrics()
    differences = [
        Differs(str(again.root), metric, *first)
        for metric in (TRAIN_LOSS, KD_LOSS, VALID_LOSS)
        if (first := _first(old.get(metric, []), new.get(metric, [])))
    ]
    if differences:
        return min(differences, key=lambda difference: difference.step)
    return BitEqual(str(again.root), len(training_losses(old)))


def _first(
    old: Sequence[tuple[int, float]], new: Sequence[tuple[int, float]]
) -> tuple[int, float | None, float | None] | None:
    """Return (step, was, now) of the first row of `old` that differs in `new`."""
    for n, (step, was) in enumerate(old):
        if n == len(new):
            return step, was, None
        other, now = new[n]
        if step < other:
            return step, was, None
        if other < step:
            return other, None, now
        if was != now and not (math.isnan(was) and math.isnan(now)):
            return step, was, now
    return None


def redirected(command: Sequence[str], folder: RunFolder, iteration: str | None) -> list[str]:
    """Return the command with a new output folder, resuming from the original's checkpoint.

    If the original started from scratch, its own checkpoints are not loaded.
    """
    new = without_flag(without_flag(command, "--load"), "--ckpt-step")
    if iteration is not None:
        new += ["--load", flag_words(command)["--load"][0]]
        new += ["--ckpt-step", iteration] if iteration.isdecimal() else []
    if "--save" in flag_words(new):
        new = [*without_flag(new, "--save"), "--save", str(folder.checkpoints)]
    new = without_flag(new, "--tensorboard-dir")
    return [sys.executable, *new[1:], "--tensorboard-dir", str(folder.tensorboard)]


def _read(run: RunFolder) -> tuple[RunConfig, Environment]:
    """Return configuration and environment of a run; RunError if it cannot be replayed."""
    needed = (run.source / PROGRAM, run.command, run.config, run.environment, run.quant_config)
    missing = [str(path.relative_to(run.root)) for path in needed if not path.is_file()]
    if not run.root.is_dir() or missing:
        raise RunError(
            f"{run.root} lacks {', '.join(missing)}",
            expected="a run folder with its source and configuration; a run of a checkout that was "
            "patched by hand keeps no source",
        )
    if not training_losses(run.read_metrics()):
        raise RunError(
            f"{run.root} recorded no loss to compare with",
            expected=f"rows of losses in {run.metrics.name}",
        )
    config = RunConfig.read(run)
    nodes = config.placement.cluster.nnodes
    if nodes > 1:
        raise RunError(
            f"{run.root} is the part of one node in a run on {nodes} nodes",
            expected="a run on one node",
        )
    return config, parsed(run.environment, Environment)


def _check_inputs(config: RunConfig, facts: Environment) -> None:
    changed = facts.inputs.changed()
    if changed:
        more = f"; and {len(changed) - LISTED} more" if len(changed) > LISTED else ""
        raise RunError(
            f"The inputs of the run have changed: {'; '.join(changed[:LISTED])}{more}",
            expected="data, tokenizer and checkpoint as they were when the run started",
            help="Restore them from a copy, at the same paths"
            if config.experiment.data_prefix or config.experiment.checkpoint
            else f"`mqo setup --dataset {config.experiment.dataset.name}` makes the sample again",
        )


def _check_versions(run: RunFolder, facts: Environment, allow: bool, report: Say) -> None:
    """Compare the versions of Python and of the packages that the run loaded.

    If an older run did not record the loaded packages, all installed ones count. Differences of
    other packages are only reported.
    """
    was = {"Python": facts.python, **facts.packages}
    now = {"Python": sys.version, **packages()}
    names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
    loaded = loaded_packages(run)
    counted = was if loaded is None else {"Python", *loaded}
    if others := [name for name in names if name not in counted]:
        report(f"note     : not loaded by {run.root.name}: {_differences(others, was, now)}")
    names = [name for name in names if name in counted]
    if not names:
        return
    text = f"Versions differ from those of {run.root.name}: {_differences(names, was, now)}"
    if not allow:
        raise RunError(
            text,
            expected=f"the versions in {run.environment.name}",
            help="--allow-versions reruns with the installed versions",
        )
    report(f"note     : {text}")


def _differences(names: Sequence[str], was: Mapping[str, str], now: Mapping[str, str]) -> str:
    parts = [f"{name} {was.get(name, 'missing')} is now {now.get(name, 'gone')}" for name in names]
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(parts[:LISTED])}{more}"


def _note_additional(original: RunFolder, again: RunFolder, report: Say) -> None:
    """Report packages that only the rerun loaded: Megatron uses some if they are installed."""
    was, now = loaded_packages(original), loaded_packages(again)
    if was is not None and now is not None and (names := sorted(now.keys() - was.keys())):
        report(
            f"note     : loaded by the rerun but not by {original.root.name}: {', '.join(names)}"
        )


def _known(run: RunFolder) -> tuple[RunData, dict[str, str]]:
    """Return the facts that the result of a replay copies from the original's."""
    try:
        result = parsed(run.result, Result)
    except RunError:  # the original failed
        return RunData(Path(), Path(), None), {}
    return RunData(Path(), Path(), result.vocab_size), result.types


def _moved(word: str, was: str, folder: RunFolder) -> str:
    """Return a path in the original's folder as a path in the new one; other words unchanged."""
    inside = word == was or word.startswith(f"{was}/")
    return f"{folder.root.resolve()}{word[len(was) :]}" if inside else word


def _copy(source: Path, target: Path) -> None:
    """Copy a file or folder of a run; RunError if a link leads out of it."""

    def copy(file: str, new: str) -> None:
        copy_file(Path(file), Path(new), within=source if source.is_dir() else source.parent)
        shutil.copymode(file, new)

    with reading(RunError):
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, ignore=ignore, copy_function=copy)
        elif source.exists():
            copy(str(source), str(target))
