"""Run jobs on this machine, as child processes with a share of the cores or GPUs each."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mqo import process
from mqo.errors import MqoError
from mqo.launch.machine import Machine
from mqo.runs import RunFolder
from mqo.sweep.job import PARENT

# A job waits for its training twice this long before it ends itself.
GRACE_S = 3 * process.GRACE_S


def log_of(run: RunFolder) -> Path:
    """Return the file of a job's output; the training's own output is in `run.log`."""
    return run.root / "job.txt"


def command(run: RunFolder, tracker: str | None = None) -> list[str]:
    """Return the command of a job."""
    return [sys.executable, "-m", "mqo.sweep.job", str(run.root), *([tracker] if tracker else [])]


def shares(
    machine: Machine,
    jobs: int | None,
    processes: int,
    runs: int,
    environ: Mapping[str, str] = os.environ,
) -> list[dict[str, str]]:
    """Return the variables of each of `jobs` concurrent jobs; by default as many as fit.

    On GPUs a job has a GPU of its own for each of its `processes`; on CPUs the jobs share the cores
    evenly. `runs` is the number of runs in the sweep. MqoError if the jobs do not fit.
    """
    devices = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[: machine.gpus]
    if len(devices) < machine.gpus:
        devices = [str(n) for n in range(machine.gpus)]
    units, unit = (machine.gpus, "GPUs") if machine.has_cuda else (machine.cores, "cores")
    room = units // processes
    count = jobs or max(1, min(room, runs))
    if count > room and (machine.has_cuda or count > 1):
        raise MqoError(
            f"{count} jobs of {processes} processes each need {count * processes} {unit}",
            expected=f"at most {room} jobs on the {units} {unit} of this machine",
            help="Change --jobs or --nproc-per-node",
        )
    threads = {"OMP_NUM_THREADS": str(max(1, machine.cores // (count * processes)))}
    if not machine.has_cuda:
        return [threads] * count
    parts = [devices[n * processes : (n + 1) * processes] for n in range(count)]
    return [threads | {"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


class Local:
    """Child processes, which end when this process does; at most `slots` run at once."""

    def __init__(self, shares: list[dict[str, str]], tracker: str | None = None) -> None:
        self.shares, self.slots, self.tracker = shares, len(shares), tracker

    def start(self, run: RunFolder, slot: int) -> subprocess.Popen:
        """Start the job of a folder with the slot's share; its output goes to `log_of(run)`."""
        env = {**os.environ, **self.shares[slot], PARENT: str(os.getpid())}
        with log_of(run).open("wb") as log:
            return subprocess.Popen(
                command(run, self.tracker),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
