"""Options of the benchmarks, their times in turns, and how much one raises a process's memory."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Workload = Callable[[], object]
Clock = Callable[[], float]


def options(about: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser of a program's options: those that are numbers, with their defaults."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def best(
    workloads: Mapping[str, Workload], repeats: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Run the workloads in turns, after one warm-up; return the minimum seconds of each."""
    for run in workloads.values():
        run()
    rounds = [{n: seconds(run, clock) for n, run in workloads.items()} for _ in range(repeats)]
    return {name: min(times[name] for times in rounds) for name in workloads}


def seconds(run: Workload, clock: Clock = time.perf_counter) -> float:
    """Return the seconds that a workload takes, including its work on a GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = clock()
    run()
    wait()
    return clock() - start


def in_own_process(program: str, *words: object) -> float:
    """Run a program, and return the JSON number that it prints, such as its peak memory."""
    command = [sys.executable, program, *map(str, words)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def raised_bytes(run: Workload) -> int:
    """Return how many bytes the peak of a workload is above the memory held before (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak_bytes()
    run()
    return _peak_bytes() - before


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
