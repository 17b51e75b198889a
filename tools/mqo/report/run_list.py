"""List the runs of a folder: when they started, their state, steps, loss and size."""

from __future__ import annotations

import datetime
import math
import os
import re
import textwrap
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mqo.errors import MqoError, RunError, one_line
from mqo.launch.config import RunConfig
from mqo.launch.failure import reason
from mqo.launch.flags import length
from mqo.launch.run import Result
from mqo.launch.run_state import State, state_of, training_now
from mqo.report.collect import find
from mqo.report.lines import WIDTH
from mqo.run_records import SHOWN, parsed
from mqo.runs import VALID_LOSS, RunFolder, flat, is_run, training_losses
from mqo.untrusted import shown

_STAMP = re.compile(r"\d{4}-\d\d-\d\d_\d{6}(?=_)")  # begins the name of a run's folder
LABEL = 38  # columns of a setting's or file's name in it


@dataclass(frozen=True)
class Listed:
    """A run in a list: `loss` is the last validation loss, or else the last training loss.

    `fault` says why the run cannot be read. `size` is in bytes on the disk, without checkpoints
    that are saved elsewhere.
    """

    name: str
    folder: str
    started: datetime.datetime
    state: State | Literal["unreadable"]
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    validated: bool = False
    size: int = 0
    fault: str = ""

    def lines(self) -> tuple[str, str]:
        """Return the run's name, and what it did in at most WIDTH columns."""
        begun = f"{self.started:%Y-%m-%d %H:%M}"
        if self.state == "unreadable":
            return shown(self.name), f"  {begun}  unreadable: {self.fault}"[:WIDTH]
        kind = "validation" if self.validated else "training"
        digits = "" if self.loss is None else f"{self.loss:.4f}"
        if self.loss is not None and len(digits) > 7:  # of a run that diverged
            digits = f"{self.loss:.4g}"
        loss = f"{kind} loss {digits}" if digits else ""
        steps, disk = f"{self.step}/{self.steps}", size(self.size)
        return shown(self.name), f"  {begun}  {self.state:8}  {steps:>13}  {loss:24}  {disk:>9}"

    def as_table(self) -> dict[str, Any]:
        """Return the run for JSON."""
        return asdict(self) | {"started": self.started.isoformat(timespec="seconds")}


def listed_runs(runs: Path) -> list[Listed]:
    """Return the runs in or below a folder, the newest last; RunError without any."""
    training = training_now()
    entries = [listed(name, run, training) for name, run in find([runs])]
    return sorted(entries, key=lambda entry: (entry.started, entry.name))


def listed(name: str, run: RunFolder, training: Set[Path]) -> Listed:
    """Return a run as an entry of a list; `training` are the folders of `training_now`."""
    begun, disk = _started(run), disk_size(run.root)
    try:
        config = RunConfig.read(run)
        state = state_of(run, config, training)
        step, loss, validated = _progress(run)
        steps = length(config.experiment).steps
    except (OSError, ValueError, KeyError, TypeError, MqoError) as error:
        fault = one_line(error)[:SHOWN]
        return Listed(name, str(run.root), begun, "unreadable", size=disk, fault=fault)
    return Listed(name, str(run.root), begun, state, step, steps, loss, validated, disk)


def _progress(run: RunFolder) -> tuple[int, float | None, bool]:
    """Return the last step, the last loss, and whether that is a validation loss."""
    if run.result.is_file():
        result = parsed(run.result, Result)
        loss = result.train_loss if result.valid_loss is None else result.valid_loss
        return result.iterations, loss, result.valid_loss is not None
    metrics = run.read_metrics()
    trained, validated = training_losses(metrics), metrics.get(VALID_LOSS, [])
    losses = validated or trained
    return trained[-1][0] if trained else 0, losses[-1][1] if losses else None, bool(validated)


def _started(run: RunFolder) -> datetime.datetime:
    """Return when a run began: by its name, or else when its configuration was written."""
    if stamp := _STAMP.match(run.root.name):
        with suppress(ValueError):
            return datetime.datetime.strptime(stamp[0], "%Y-%m-%d_%H%M%S")
    return datetime.datetime.fromtimestamp(run.config.stat().st_mtime)


def disk_size(folder: Path) -> int:
    """Return the bytes that the files below a folder take on the disk; links are not followed."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a running training removes files
                total += Path(path, name).lstat().st_blocks * 512
    return total


def size(count: float) -> str:
    """Return bytes as '3 KiB', '31 MiB' or '1.4 GiB'."""
    if count < 1 << 20:
        return f"{math.ceil(count / (1 << 10))} KiB"
    if count < 1 << 30:
        return f"{count / (1 << 20):.0f} MiB"
    return f"{count / (1 << 30):,.1f} GiB"


# -- a single run --------------------------------------------------------------------------------


def run_named(runs: Path, name: str) -> RunFolder:
    """Return the run of a path, or of a name in the list of `runs`; RunError for other folders."""
    for root in (Path(name), runs / name):
        if name and is_run(root):
            return RunFolder(root)
    exists = Path(name).exists() or (runs / name).exists()
    raise RunError(
        f"{name!r} is not a run" + ("" if exists else f": {runs} has no folder of that name"),
        expected="a folder with a cell.json, by its path or its name in the list",
        help="`mqo runs` lists the runs",
    )


@dataclass(frozen=True)
class Details:
    """All that `mqo runs show` prints of a run. `files` has the size of each entry in bytes."""

    run: Listed
    settings: dict[str, Any]
    result: str
    files: dict[str, int]

    def lines(self) -> Iterator[str]:
        """Yield the list's lines, the settings, the result and the files."""
        wrap = partial(textwrap.wrap, width=WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
        yield from self.run.lines()
        yield from wrap(self.result)
        yield "configuration (cell.json, without what is empty):"
        for name, value in self.settings.items():
            yield from wrap(f"{name:{LABEL}}  {value}")
        yield f"files of {self.run.folder}:"
        yield from (f"  {name:{LABEL}}  {size(count):>9}" for name, count in self.files.items())


def details(run: RunFolder) -> Details:
    """Return the details of a run; RunError if its configuration cannot be read."""
    entry = listed(run.root.name, run, training_now())
    settings = settings_of(run.read_config())
    result = ""
    if entry.state == "finished":
        result = parsed(run.result, Result).line()
    elif entry.state in ("failed", "killed") and (run.log.is_file() or run.failure.is_file()):
        result = f"last message: {reason(run)}"
    files = {
        path.name + "/" * path.is_dir(): disk_size(path) if path.is_dir() else path.lstat().st_size
        for path in sorted(run.root.iterdir())
    }
    return Details(entry, settings, result, files)


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return {path with dots: value} of a configuration, without values that are empty."""
    return {name: value for name, value in flat(config) if value not in ("", "[]")}
