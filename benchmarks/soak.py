"""A long run, and the same one killed over and over: are losses equal, memory and files flat?

    .venv/bin/python benchmarks/soak.py FOLDER [--steps 2000] [--kills 10] [--mode FA_linear_mxfp8]

Both are llama32-1b at smoke size and go side by side, with half of the cores each. Every other kill
comes as soon as a checkpoint's folder appears, which is then half written; the rest come at a
step. A kill is SIGKILL for all processes; the same command goes on. FOLDER, a new one, gets the
checkpoints and samples.csv: each second the training process's memory and open descriptors.
Prints tables, and exits with 1 where a loss differs in any bit or something grew.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from mqo.matrix import tables
from mqo.project import Project
from mqo.runs import TRAIN_LOSS, VALID_LOSS, MetricsTail, RunFolder

PROJECT = Project.here()
SAVE_EVERY, MIB = 40, 2**20
BATCH = tables.trainings()["smoke"].global_batch
# The most that the last quarter of a run may have beyond its second one.
GROWTH, DESCRIPTORS = 0.02, 2


@dataclass(frozen=True)
class Kill:
    """When to kill: at a step, or as soon as a checkpoint of that step or a later one appears."""

    step: int
    in_save: bool


@dataclass(frozen=True)
class Sample:
    """What a training process held after a step: resident bytes, and open descriptors."""

    run: str
    step: int
    resident: int
    descriptors: int


@dataclass
class Long:
    """A training that goes on from where it was killed; one run folder for each start."""

    name: str
    folder: Path
    steps: int
    mode: str
    runs: list[RunFolder] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def train(self, kills: list[Kill]) -> None:
        """Train to its end, through all kills."""
        for kill in [*kills, None]:
            self._start(kill)

    def _start(self, kill: Kill | None) -> None:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
            process = subprocess.Popen(
                command(self), cwd=PROJECT.root, env=environment, stdout=log, stderr=log
            )
        run = self._folder_of(process)
        self.runs.append(run)
        rows, step = MetricsTail(run.metrics), 0
        while process.poll() is None:
            step = max([step, *(row["iteration"] for row in rows.rows())])
            if kill and self._is_due(kill, step):
                kill_all(process)
                said = f"{self.name}: killed at step {step}"
                print(said + (" in a save" if kill.in_save else ""), file=sys.stderr, flush=True)
                return
            self._sample(process, run, step)
            time.sleep(0.02 if kill and kill.in_save and step >= kill.step else 1)
        if process.returncode or kill:
            sys.exit(f"{run.root} ended by itself with {process.returncode}: see {self.folder}")

    def _folder_of(self, process: subprocess.Popen) -> RunFolder:
        """Return the folder of what was just started: a new one, whose run has our checkpoints."""
        while process.poll() is None:
            for config in sorted(PROJECT.runs.glob("*/cell.json")):
                run = RunFolder(config.parent)
                with suppress(ValueError):  # it is being written
                    place = run.read_config()["experiment"].get("checkpoint")
                    known = [known.root for known in self.runs]
                    if place == str(self.checkpoints) and run.root not in known:
                        return run
            time.sleep(0.2)
        sys.exit(f"{self.name} did not start: see {self.folder}")

    @property
    def checkpoints(self) -> Path:
        """Where all its starts save."""
        return self.folder / f"{self.name}_checkpoints"

    def _is_due(self, kill: Kill, step: int) -> bool:
        if not kill.in_save:
            return step >= kill.step
        saved = [int(path.name[5:]) for path in self.checkpoints.glob("iter_*")]
        return max(saved, default=0) >= kill.step

    def _sample(self, process: subprocess.Popen, run: RunFolder, step: int) -> None:
        for worker in workers(process):
            with suppress(psutil.NoSuchProcess):
                held = Sample(run.root.name, step, worker.memory_info().rss, worker.num_fds())
                self.samples.append(held)


def workers(process: subprocess.Popen) -> Iterator[psutil.Process]:
    """Yield the training processes below a launcher, without torchrun."""
    with suppress(psutil.NoSuchProcess):
        for below in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = below.cmdline()
                if any(w.endswith("pretrain_gpt.py") for w in words[1:3]) and "-m" not in words[:3]:
                    yield below


def kill_all(process: subprocess.Popen) -> None:
    """Kill the launcher, torchrun and the training at once, by SIGKILL."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for worker in below:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    process.wait()
    psutil.wait_procs(below)


def main() -> None:
    """Train both, and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--mode", default="FA_linear_mxfp8")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    whole, killed = (Long(name, folder, given.steps, given.mode) for name in ("whole", "killed"))
    kills = plan(given.steps, given.kills)
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(whole.train, []), pool.submit(killed.train, kills)]:
            done.result()
    write(folder / "samples.csv", [*whole.samples, *killed.samples])
    wrong = differences(whole, killed, given.steps) + grown(whole, given.steps)
    print("\n".join(wrong or ["", "all equal, nothing grew"]))
    sys.exit(bool(wrong))


def command(long: Long) -> list[str]:
    """Return the command that trains, and goes on from its checkpoints."""
    words = [sys.executable, "script/train_config.py", "--model", "llama32-1b"]
    words += ["--dataset", "wikipedia", "--quantization", long.mode]
    words += ["--training-config", "smoke", "--keep-last", "3", str(long.checkpoints)]
    words += ["--", "--train-samples", str(long.steps * BATCH)]
    return [*words, "--save-interval", str(SAVE_EVERY), "--eval-interval", "500"]


def plan(steps: int, kills: int) -> list[Kill]:
    """Spread kills over the run by chance, the same each time."""
    spread = random.Random(0)
    part = (steps - 2 * SAVE_EVERY) // kills
    return [Kill(n * part + spread.randrange(1, part), n % 2 == 1) for n in range(kills)]


def write(path: Path, samples: list[Sample]) -> None:
    """Write a row a sample."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["run", "step", "resident", "descriptors"])
        rows.writerows((s.run, s.step, s.resident, s.descriptors) for s in samples)


def differences(whole: Long, killed: Long, steps: int) -> list[str]:
    """Print what was compared; return what is wrong."""
    wrong, seen = [], []
    expected = losses(whole.runs[0])
    for run in killed.runs:
        found = losses(run)
        seen += found
        differ = [at for at, values in found.items() if expected.get(at) != values]
        wrong += [f"{run.root.name}: {name} of step {step} differs" for name, step in differ]
    missing = {at for at in expected if at[0] == TRAIN_LOSS} - {*seen}
    wrong += [f"{len(missing)} steps have no loss"] if missing else []
    print(f"{len(seen)} losses of {len(killed.runs)} starts compared with {steps} steps")
    return wrong


def losses(run: RunFolder) -> dict[tuple[str, int], list[float]]:
    """Return {(metric, step): values}; the last step is validated twice, on other samples."""
    found: dict[tuple[str, int], list[float]] = {}
    metrics = run.read_metrics()
    for name in (TRAIN_LOSS, VALID_LOSS):
        for step, value in metrics.get(name, []):
            found.setdefault((name, step), []).append(value)
    return found


def grown(whole: Long, steps: int) -> list[str]:
    """Print a row a quarter of the run that was not killed; what is wrong."""
    print("\n| steps | resident, MiB | most | open descriptors | most |\n|---|---|---|---|---|")
    memory, descriptors = [], []
    for n in range(4):
        first, last = n * steps // 4, (n + 1) * steps // 4
        held = [s for s in whole.samples if first < s.step <= last]
        memory.append(statistics.median(s.resident for s in held) / MIB)
        descriptors.append(statistics.median(s.descriptors for s in held))
        most = max(s.resident for s in held) / MIB, max(s.descriptors for s in held)
        cells = [f"{first + 1} to {last}", f"{memory[-1]:.1f}", f"{most[0]:.1f}"]
        print(f"| {' | '.join([*cells, f'{descriptors[-1]:.0f}', str(most[1])])} |")
    wrong = ["memory grew"] if memory[3] > memory[1] * (1 + GROWTH) else []
    return wrong + (["descriptors leak"] if descriptors[3] > descriptors[1] + DESCRIPTORS else [])


if __name__ == "__main__":
    main()
