"""Times jobs that take turns, and measures by how much something raises a process's memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Job = Callable[[], object]
Clock = Callable[[], float]


def best(
    jobs: Mapping[str, Job], repeats: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Run the jobs in turns, once more than `repeats`; return the least seconds of each."""
    for job in jobs.values():
        job()
    rounds = [{name: seconds(job, clock) for name, job in jobs.items()} for _ in range(repeats)]
    return {name: min(times[name] for times in rounds) for name in jobs}


def seconds(job: Job, clock: Clock = time.perf_counter) -> float:
    """Return how long a job takes, what it left to a GPU included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = clock()
    job()
    wait()
    return clock() - start


def in_own_process(program: str, *words: object) -> float:
    """Return the JSON number that a program prints, such as the peak of its memory."""
    command = [sys.executable, program, *map(str, words)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def raised_bytes(run: Job) -> int:
    """Return by how many bytes the peak of a run is above what the process holds before (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak_bytes()
    run()
    return _peak_bytes() - before


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
