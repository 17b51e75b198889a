"""Jobs on this machine: child processes, each with its share of the cores or GPUs."""

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

# A job gives its training this long, twice, before it ends itself.
GRACE_S = 3 * process.GRACE_S


def log_of(run: RunFolder) -> Path:
    """Return what a job prints; the training's own output is in `run.log`."""
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
    """Return the variables of each of `jobs` at once; None: as many of `runs` as there is room.

    On GPUs a job has one for each of its `processes`, and no other job has it; on CPUs it has as
    many threads as cores are left to it. MqoError for more than there is room for.
    """
    devices = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[: machine.gpus]
    if len(devices) < machine.gpus:
        devices = [str(n) for n in range(machine.gpus)]
    units, what = (machine.gpus, "GPUs") if machine.has_cuda else (machine.cores, "cores")
    room = units // processes
    count = jobs or max(1, min(room, runs))
    if count > room and (machine.has_cuda or count > 1):
        raise MqoError(
            f"{count} jobs of {processes} processes each want {count * processes} {what}",
            expected=f"at most {room} jobs, for the {units} {what} that there are",
            help="Change --jobs or --nproc-per-node",
        )
    threads = {"OMP_NUM_THREADS": str(max(1, machine.cores // (count * processes)))}
    if not machine.has_cuda:
        return [threads] * count
    parts = [devices[n * processes : (n + 1) * processes] for n in range(count)]
    return [threads | {"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


class Child:
    """A job that was started."""

    def __init__(self, child: subprocess.Popen) -> None:
        self.child = child

    def poll(self) -> int | None:
        """Return its exit code, None while it runs; a negative one is the signal that ended it."""
        return self.child.poll()

    def ask_to_end(self) -> None:
        """Ask, without waiting."""
        if self.child.poll() is None:
            self.child.terminate()

    def end(self) -> None:
        """End it, with all that it started, and wait for that."""
        process.end(self.child, GRACE_S)


class Local:
    """Child processes of this one, which end when it does; `slots` are as many as run at once."""

    def __init__(self, shares: list[dict[str, str]], tracker: str | None = None) -> None:
        self.shares, self.slots, self.tracker = shares, len(shares), tracker

    def start(self, run: RunFolder, slot: int) -> Child:
        """Start the job of a folder with the slot's share; its output goes to `log_of(run)`."""
        env = {**os.environ, **self.shares[slot], PARENT: str(os.getpid())}
        with log_of(run).open("wb") as log:
            child = subprocess.Popen(
                command(run, self.tracker),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Child(child)
