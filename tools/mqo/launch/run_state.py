"""Tell whether a run is running, finished, failed or killed; remove one that does not run."""

from __future__ import annotations

import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Literal

from mqo.launch import checkpoint_lock
from mqo.launch.config import RunConfig
from mqo.launch.flags import save_folder
from mqo.launch.lock_holder import Host
from mqo.launch.options import ENVIRONMENT_VARIABLE
from mqo.output import target_of
from mqo.overlay.transaction import remove_tree
from mqo.process import temporary_folder
from mqo.runs import RunFolder

State = Literal["running", "finished", "failed", "killed"]
PREPARING_S = 60  # a run that does not change for longer is no longer being prepared


def training_now() -> frozenset[Path]:
    """Return the folders of the runs whose training processes run on this machine."""
    import psutil

    folders = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if config := process.environ().get(ENVIRONMENT_VARIABLE):
                folders.add(Path(config).parent.resolve())
    return frozenset(folders)


def state_of(run: RunFolder, config: RunConfig, training: Set[Path]) -> State:
    """Return the state of a run; `training` are the folders of `training_now`.

    A run on another machine is known to be running if it saves checkpoints, by its heartbeat. A run
    without a result that does not run failed if it recorded why; otherwise it was killed.
    """
    if run.result.is_file():
        return "finished"
    if run.root.resolve() in training or _holds_lock(run, config) or _is_prepared(run):
        return "running"
    return "failed" if run.failure.is_file() else "killed"


def remove(run: RunFolder) -> None:
    """Remove the folder of a run; OutputError if it is a symbolic link.

    It is renamed first, so that a killed command leaves no part of a run under its name.
    """
    root = target_of(run.root)
    with temporary_folder(f".{root.name}-", root.parent) as trash:
        root.rename(trash / root.name)
        remove_tree(trash / root.name)


def _holds_lock(run: RunFolder, config: RunConfig) -> bool:
    folder = save_folder(config, run)
    record = checkpoint_lock.record_in(folder) if folder else None
    here, now = Host.here(), time.time()
    holders = record.holders if record else ()
    ours = [holder for holder in holders if holder.run.resolve() == run.root.resolve()]
    return any(holder.state(here, now) != "gone" for holder in ours)


def _is_prepared(run: RunFolder) -> bool:
    """Return whether a command seems to write the files from before the training."""
    if run.log.exists() or run.failure.exists():
        return False
    return time.time() - run.root.stat().st_mtime < PREPARING_S
