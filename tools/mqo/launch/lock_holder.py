"""Read and write the content of mqo.lock, and find whether its processes still run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mqo.launch.config import Cluster

STALE_S = 600  # without a heartbeat for this long, a holder on another host counts as gone
# An orphan is a training whose launcher was killed.
State = Literal["live", "orphan", "gone"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Host(_Frozen):
    """A machine, its current boot, and the PID namespace of the process on it.

    Process ids are compared only if all three are equal: two containers can share a host name.
    """

    name: str
    boot: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Host:
        """Return the host of this process."""
        boot = namespace = ""
        with suppress(OSError):  # some sandboxes have neither
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = str(Path("/proc/self/ns/pid").readlink())
        return cls(name=platform.node(), boot=boot, pid_namespace=namespace)


class Process(_Frozen):
    """A process: its id, and its start in clock ticks since boot, because ids are reused."""

    pid: int
    started: int

    @classmethod
    def running(cls, pid: int) -> Process:
        """Return the process that runs under `pid`; ProcessLookupError if there is none."""
        stat = _stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid=pid, started=stat[1])

    def is_running(self) -> bool:
        """Return whether it runs; a zombie does not."""
        stat = _stat(self.pid)
        if stat is None:
            return _is_hidden(self.pid)
        state, started = stat
        return started == self.started and state not in "ZX"


class Holder(_Frozen):
    """One node's part of a run: its launcher, then the training process.

    `heartbeat` is when the holder last wrote the file, in seconds since the epoch.
    """

    node: int
    run: Path
    host: Host
    processes: tuple[Process, ...] = Field(min_length=1)
    heartbeat: int

    def state(self, here: Host, now: float) -> State:
        """Return its state, by its processes on this host, or else by its heartbeat."""
        if self.host != here:
            return "live" if now - self.heartbeat < STALE_S else "gone"
        running = [process.is_running() for process in self.processes]
        return "live" if running[0] else "orphan" if any(running) else "gone"

    def described(self, here: Host, now: float) -> str:
        """Return run, process and host, for an error."""
        ids = [process.pid for process in self.processes]
        if self.host == here:
            ids = [process.pid for process in self.processes if process.is_running()] or ids
        age = max(0, round(now - self.heartbeat))
        seen = "" if self.host == here else f", last heartbeat {age} s ago"
        return f"run {self.run}, process {ids[0]} on host {self.host.name}{seen}"


class RunIdentity(_Frozen):
    """The identity of a run on several nodes: the address of node 0, and Slurm's job."""

    nnodes: int
    address: str
    slurm_job: str = ""
    slurm_restart: int = 0

    @classmethod
    def from_cluster(cls, where: Cluster, environ: Mapping[str, str] = os.environ) -> RunIdentity:
        """Return the identity of a run with these processes."""
        restart = environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            nnodes=where.nnodes,
            address=f"{where.master_addr}:{where.master_port or ''}",
            slurm_job=environ.get("SLURM_JOB_ID", ""),
            slurm_restart=int(restart) if restart.isdecimal() else 0,
        )

    def admits(self, other: RunIdentity) -> bool:
        """Return whether both are nodes of the same run on several nodes."""
        return self.nnodes > 1 and self == other

    def is_requeue_of(self, other: RunIdentity) -> bool:
        """Return whether Slurm restarted this job after `other` ended."""
        same = bool(self.slurm_job) and self.slurm_job == other.slurm_job
        return same and self.slurm_restart > other.slurm_restart


class LockRecord(_Frozen):
    """The content of mqo.lock: the run that saves in the folder, with one holder per node."""

    job: RunIdentity
    holders: tuple[Holder, ...]

    @classmethod
    def parse(cls, content: bytes) -> LockRecord:
        """Return the record, ignoring text after it, of a longer one; ValueError if damaged."""
        try:
            table: Any = json.JSONDecoder().raw_decode(content.decode())[0]
            return cls.model_validate(table)
        except (ValidationError, RecursionError) as error:
            raise ValueError("not the record of a lock") from error

    def fellows(self, job: RunIdentity, node: int) -> tuple[Holder, ...]:
        """Return the other nodes' holders of the same run on several nodes."""
        same = job.admits(self.job)
        return tuple(holder for holder in self.holders if same and holder.node != node)

    def rivals(self, job: RunIdentity, node: int) -> tuple[Holder, ...]:
        """Return the holders with which this node of `job` cannot share the folder."""
        if job.is_requeue_of(self.job):
            return ()
        same = job.admits(self.job)
        return tuple(holder for holder in self.holders if not same or holder.node == node)

    def held_by(self, process: Process, host: Host) -> bool:
        """Return whether this launcher is among the holders."""
        return any(h.processes[:1] == (process,) and h.host == host for h in self.holders)


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state and start of a process; None if /proc does not show it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return fields[0], int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Return whether /proc hides a running process of another user (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False
