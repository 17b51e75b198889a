"""Run jobs on Slurm through submitit, which the extra `slurm` installs."""

import subprocess
from pathlib import Path
from typing import Any

from mqo.errors import MqoError
from mqo.extras import package
from mqo.runs import RunFolder
from mqo.sweep.local import command, log_of
from mqo.sweep.state import SweepFolder

# submitit's own names of common options; other options have sbatch's names.
SHARED = ("cpus_per_task", "gpus_per_node", "mem_gb", "name", "timeout_min")
CLUSTER = "cluster"


def options(text: str) -> dict[str, str | int]:
    """Return the options in `--slurm KEY=VALUE,...`, with whole numbers; MqoError without a '='."""
    result: dict[str, str | int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise MqoError(
                f"--slurm has the part '{part}'",
                expected="KEY=VALUE,... such as partition=gpu,time=600,gpus_per_node=1",
            )
        result[name] = int(value) if value.isdecimal() else value
    return result


def call(words: list[str], log: Path) -> int:
    """Run a command on the node with its output in a file; return the exit code."""
    with log.open("wb") as output:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode


class Submitted:
    """A job on Slurm, with the methods of a process."""

    def __init__(self, job: Any, run: RunFolder) -> None:
        self.job, self.run = job, run

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        if not self.job.done():
            return None
        error = self.job.exception()
        if error is None:
            return self.job.result()
        with log_of(self.run).open("a", encoding="utf-8") as log:  # Slurm gives the reason
            words = str(error).strip().splitlines() or [type(error).__name__]
            log.write(f"\nmqo: {self.job.job_id} on Slurm ({self.job.state}): {words[0]}\n")
        return 1

    def terminate(self) -> None:
        """Cancel it without waiting; Slurm ends all its processes."""
        self.job.cancel(check=False)


class Slurm:
    """At most `slots` submitted jobs; the option `cluster=local` runs them without Slurm."""

    def __init__(
        self,
        folder: SweepFolder,
        given: dict[str, str | int],
        slots: int,
        tracker: str | None = None,
    ) -> None:
        submitit = package("submitit")
        named = {key: value for key, value in given.items() if key != CLUSTER}
        try:
            cluster = str(given.get(CLUSTER, "slurm"))
            self.executor = submitit.AutoExecutor(folder.root / ".submitit", cluster=cluster)
            self.executor.update_parameters(
                **{k if k in SHARED else f"slurm_{k}": v for k, v in named.items()}
            )
        except (RuntimeError, NameError, ValueError, TypeError, AssertionError) as error:
            raise MqoError(
                f"submitit does not accept --slurm: {str(error).splitlines()[0]}",
                expected="options of sbatch, with time in minutes, on a machine with Slurm",
            ) from error
        self.slots, self.tracker = slots, tracker

    def start(self, run: RunFolder, slot: int) -> Submitted:
        """Submit the job."""
        return Submitted(self.executor.submit(call, command(run, self.tracker), log_of(run)), run)
