"""Run the jobs of a sweep in parallel: start, watch, retry once, and end them."""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from subprocess import Popen
from typing import Any

from mqo.launch.progress import Progress
from mqo.process import end, held, stops_raise
from mqo.runs import RunFolder
from mqo.sweep.configs import Job
from mqo.sweep.local import GRACE_S, Local, log_of
from mqo.sweep.slurm import Slurm, Submitted
from mqo.sweep.state import Entry, SweepFolder
from mqo.sweep.table import View, counts
from mqo.terminal import last_error
from mqo.untrusted import Limit, UntrustedFileError, read_text

POLL_S = 0.2
TRIES = 2


@dataclass
class _Running:
    job: Job
    handle: Popen | Submitted
    run: RunFolder
    slot: int
    progress: Progress


class Pool:
    """The jobs of a sweep; each change of state is written to sweep.json before the next one."""

    def __init__(
        self,
        folder: SweepFolder,
        jobs: Sequence[Job],
        executor: Local | Slurm,
        view: View,
    ) -> None:
        self.folder, self.executor, self.view = folder, executor, view
        self.entries = folder.entries(jobs)
        self.queue = [job for job in jobs if self.entries[job.name].state != "done"]
        self.skipped = len(jobs) - len(self.queue)
        self.running: list[_Running] = []
        self.tries: Counter[str] = Counter()
        self.warm: set[tuple] = set()

    def run(self) -> dict[str, Entry]:
        """Run until all jobs have ended; return {name: entry}. A signal ends the running jobs."""
        self.folder.write(self.entries)
        with stops_raise():
            try:
                while self.queue or self.running:
                    self._fill()
                    self._collect()
                    self._show()
                    time.sleep(POLL_S)
            finally:
                self._stop()
        return self.entries

    def _fill(self) -> None:
        """Start jobs while there is a free slot and a job that may start."""
        taken = {running.slot for running in self.running}
        for slot in set(range(self.executor.slots)) - taken:
            job = next(filter(self._may_start, self.queue), None)
            if job is None:
                return
            self.queue.remove(job)
            self._start(job, slot)

    def _may_start(self, job: Job) -> bool:
        """Return whether no running job may be writing the index that this job would read.

        Upstream writes it in place, and a reader of an incomplete index fails.
        """
        busy = {running.job.data_key for running in self.running}
        return job.data_key in self.warm or job.data_key not in busy

    def _start(self, job: Job, slot: int) -> None:
        run = self.folder.new_run(job)
        self.tries[job.name] += 1
        attempts = self.entries[job.name].attempts + 1
        self._set(job, state="running", run=run.root.name, attempts=attempts, reason="")
        with held():
            handle = self.executor.start(run, slot)
            self.running.append(
                _Running(job, handle, run, slot, Progress(job.config.experiment, run.metrics))
            )
        self.view.say(f"started  {job.name}")

    def _collect(self) -> None:
        """Record the jobs that ended, and the first steps of the others."""
        for running in list(self.running):
            code = running.handle.poll()
            running.progress.update()
            if running.progress.step:
                self.warm.add(running.job.data_key)
            if code is not None:
                self.running.remove(running)
                self._ended(running, code)

    def _ended(self, ended: _Running, code: int) -> None:
        done = self.entries[ended.job.name].ended_well(ended.run) if code == 0 else None
        if done:
            self.entries[ended.job.name] = done
            self.folder.write(self.entries)
            self.view.say(f"done     {ended.job.name}")
            self.view.say(ended.progress.losses())
            return
        reason = reason_of(ended.run, code)
        again = self.tries[ended.job.name] < TRIES
        self._set(ended.job, state="queued" if again else "failed", reason=reason)
        if again:
            self.queue.append(ended.job)
        more = "; it will be tried again" if again else ""
        self.view.say(f"failed   {ended.job.name}: {reason.rstrip('.')}{more}")

    def _set(self, job: Job, **changes: Any) -> None:
        self.entries[job.name] = replace(self.entries[job.name], **changes)
        self.folder.write(self.entries)

    def _show(self) -> None:
        running = {job.job.name: job.progress for job in self.running}
        self.view.show(list(self.entries.values()), running)

    def _stop(self) -> None:
        """End the running jobs and queue them again."""
        if not self.running:
            return
        with held():
            for running in self.running:
                running.handle.terminate()
                self._set(running.job, state="queued", reason="the sweep was ended")
            for running in self.running:
                if isinstance(running.handle, Popen):
                    end(running.handle, GRACE_S)
        done = counts(list(self.entries.values()))
        self.view.say(f"ended    {done}; the same command continues this sweep")


def reason_of(run: RunFolder, code: int) -> str:
    """Return why a job failed: its own error, or the last line that it printed."""
    try:
        output = read_text(log_of(run), Limit.TEXT, errors="replace")
    except UntrustedFileError:
        output = ""
    if own := last_error(output):
        return own
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = reversed(output.splitlines())
    last = next((line for line in lines if line.strip()), "it printed nothing")
    return f"exit code {code}: {last.strip()}"
