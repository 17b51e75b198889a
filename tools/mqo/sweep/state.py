"""Manage a sweep's folder: the run folders, and sweep.json with the state of each run."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, Self

from filelock import FileLock, Timeout
from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass

from mqo.errors import MqoError, RunError, full_disk_of, one_line
from mqo.launch.config import RunConfig
from mqo.launch.run import Result
from mqo.run_records import SHOWN, parsed
from mqo.runs import SWEEP, RunFolder, new_folder, replace_text
from mqo.sweep.configs import Job
from mqo.untrusted import NoFileError, read_json_object

SCHEMA = 1
State = Literal["queued", "running", "done", "failed"]


@dataclass(frozen=True)
class Entry:
    """A run in sweep.json. `run` is the folder of its last attempt, inside the sweep's folder.

    Losses are in nats per token, `seconds` is the training's lifetime, as in result.json.
    """

    name: str
    digest: str
    state: State = "queued"
    run: str | None = None
    attempts: int = 0
    reason: str = ""
    iterations: int | None = None
    train_loss: float | None = None
    valid_loss: float | None = None
    seconds: FiniteFloat | None = None

    def ended_well(self, run: RunFolder) -> Self | None:
        """Return the entry with the run's result; None if the run has no result."""
        try:
            result = parsed(run.result, Result)
        except RunError:
            return None
        names = ("iterations", "train_loss", "valid_loss", "seconds")
        return replace(
            self, state="done", reason="", **{name: getattr(result, name) for name in names}
        )


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    root: Path

    @property
    def file(self) -> Path:
        """Return sweep.json."""
        return self.root / SWEEP

    def run_of(self, entry: Entry) -> RunFolder:
        """Return the folder of the last attempt, which must exist."""
        return RunFolder(self.root / str(entry.run))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder for one sweep; MqoError for a second one."""
        with full_disk_of(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            holder, lock = self.root / ".holder", FileLock(self.root / ".lock")
            try:
                held = lock.acquire(timeout=0)
            except Timeout:
                who = ""
                if holder.exists():
                    who = holder.read_text(encoding="utf-8", errors="replace")
                raise MqoError(
                    f"Another sweep is running in {self.root}{who and f' (process {who})'}",
                    expected="one sweep at a time in a folder",
                    help="Wait for it to end, or give this sweep another folder with -o",
                ) from None
            with held:
                try:
                    holder.write_text(str(os.getpid()), encoding="utf-8")
                    yield
                finally:
                    if not self.file.exists():  # the sweep wrote nothing
                        holder.unlink(missing_ok=True)
                        (self.root / ".lock").unlink(missing_ok=True)
                        with suppress(OSError):
                            self.root.rmdir()

    def entries(self, jobs: Sequence[Job]) -> dict[str, Entry]:
        """Return {name: entry} for the entries in sweep.json and for the jobs.

        A successful run counts even if the sweep ended before recording it. Runs that were
        interrupted or failed are queued again. MqoError if a run of the same name was configured
        differently.
        """
        entries = {entry.name: self._seen(entry) for entry in self.read()}
        for job in jobs:
            entries.setdefault(job.name, Entry(job.name, job.digest))
        self._check_same([(entries[job.name], job) for job in jobs])
        for job in jobs:
            entries[job.name] = replace(entries[job.name], digest=job.digest)
        names = {job.name for job in jobs}
        return {
            name: replace(entry, state="queued")
            if entry.state == "running" or (entry.state == "failed" and name in names)
            else entry
            for name, entry in entries.items()
        }

    def _check_same(self, pairs: Sequence[tuple[Entry, Job]]) -> None:
        """Raise MqoError if an entry's run has other settings than its job.

        Another version may compute digests differently. Then the settings of the runs that began
        decide, also for the others.
        """
        begun = {entry.name: self._has_settings(entry, job) for entry, job in pairs if entry.run}
        for entry, job in pairs:
            same = entry.digest == job.digest or begun.get(entry.name, any(begun.values()))
            if not same:
                raise MqoError(
                    f"{self.file} holds {entry.name} with other settings",
                    expected="the same training configuration, flags and quantizers as before",
                    help="Give another folder with -o: `mqo report` takes several folders",
                )

    def _has_settings(self, entry: Entry, job: Job) -> bool:
        if entry.digest == job.digest:
            return True
        run = self.run_of(entry)
        if not run.config.exists():
            return False
        was, now = (config.with_layout(()) for config in (RunConfig.read(run), job.config))
        return was.settings() == now.settings()

    def _seen(self, entry: Entry) -> Entry:
        if entry.run is None or entry.state == "failed":
            return entry
        return entry.ended_well(self.run_of(entry)) or replace(entry, state="queued")

    def read(self) -> list[Entry]:
        """Return the entries in sweep.json; [] if the file does not exist."""
        try:
            table = read_json_object(self.file)
            if table["schema"] != SCHEMA:
                raise ValueError(f"its schema is {table['schema']}")
            return [Entry(**row) for row in table["cells"]]
        except NoFileError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise MqoError(
                f"{self.file} cannot be read: {one_line(error)[:SHOWN]}",
                expected="what a sweep of this version wrote",
                help="Move it away to start over, or give another folder with -o",
            ) from error

    def write(self, entries: Mapping[str, Entry]) -> None:
        """Write all entries atomically."""
        table = {"schema": SCHEMA, "cells": [asdict(entry) for entry in entries.values()]}
        replace_text(self.file, json.dumps(table, indent=1) + "\n")

    def new_run(self, job: Job) -> RunFolder:
        """Create a folder for an attempt, with the configuration in it, for `mqo.sweep.job`."""
        run = new_folder(self.root, job.name)
        job.config.write(run)
        return run
