"""Train the arms of the study that runs.csv lacks, one row per run; rerun to continue.

    .venv/bin/python benchmarks/study/study.py study [--jobs 2] [--minutes 20]

Runs with the same seed share initial weights, data and order; they differ only in what is
quantized. The launcher trains each run in its own process, on one core. A row has everything needed
to train it again (model, arm, size, steps, seed, commit, versions), and its validation losses.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import fcntl
import importlib.metadata
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mqo.launch.config import RunConfig, resolve
from mqo.launch.run import run
from mqo.overlay.vendor import Pin
from mqo.project import Project
from mqo.quant.spec import NONE
from mqo.recipes import recipe as recipes
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder, Series

HERE = Path(__file__).parent
TABLE = HERE / "runs.csv"
ARMS = tomllib.loads((HERE / "arms.toml").read_text(encoding="utf-8"))
BATCH = 4  # sequences per step, in the configuration `study`
EVALUATIONS = 10  # during a training; one more follows it
EVAL_BATCHES = 32  # per evaluation, the same in all runs of a size and length
TAIL = 20  # last steps, over which the training loss is averaged


@dataclass(frozen=True)
class Cell:
    """The configuration of one run of the study."""

    model: str
    arm: str
    size: str
    steps: int
    seed: int

    @property
    def config(self) -> RunConfig:
        """Return the launcher's configuration: `study`, at this size and length."""
        arm = ARMS["arms"][self.arm]
        flags = (
            *ARMS["sizes"][self.size][self.model].split(),
            *("--train-samples", str(self.steps * BATCH), "--seed", str(self.seed)),
            *("--eval-interval", str(self.steps // EVALUATIONS), "--eval-iters", str(EVAL_BATCHES)),
        )
        rest: dict[str, Any] = {"extra_flags": flags, "schedule": tuple(arm.get("schedule", ()))}
        rest |= arm.get("options", {})
        if "linear" in arm:
            exclude = ("output_layer", *arm.get("exclude", ()))
            rest |= {"linear": arm["linear"], "gemms": "all", "exclude": exclude}
        if "attention" in arm:
            rest |= {name: arm[name] for name in ("attention", "attention_gemms") if name in arm}
        if "recipe" in arm:
            rest["recipe"] = recipes.chosen(_file(arm["recipe"]), arm.get("without", ()), ())
        config = resolve(self.model, "dolma", "bf16", "study", **rest)
        if (config.quantization.types or {}).get("wgrad", NONE) == NONE:
            return config
        return resolve(self.model, "dolma", "bf16", "study", **rest, gradient_noise=True)


def _file(recipe: str) -> str:
    """Return a recipe's name, or the path of a recipe file in this folder."""
    return str(HERE / recipe) if recipe.endswith(".toml") else recipe


@dataclass(frozen=True)
class TrainedCell(Cell):
    """A row of runs.csv: a run and its results; losses in nats per token.

    `validation` is the mean of all evaluations after the last step, on different batches.
    """

    validation: float
    training: float
    curve: str  # [[step, validation loss], ...]
    seconds: float
    date: str
    commit: str
    upstream: str
    torch: str
    sqnr: str  # {SITE.OPERAND: dB}, over the measured steps and all layers
    noise_ratio: float | None = None  # gradient to noise in wgrad, last measured step, all layers


def main() -> None:
    """Train the missing runs of a phase, or one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("phase", choices=[*ARMS["phases"], "one"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    for field in fields(Cell):
        kind = int if field.name in ("steps", "seed") else str
        parser.add_argument(f"--{field.name}", type=kind, help="with `one`: of the run to train")
    given = parser.parse_args()
    if given.phase == "one":
        append(train(Cell(**{field.name: getattr(given, field.name) for field in fields(Cell)})))
        return
    trained = done()
    missing = [cell for cell in cells(given.phase) if cell not in trained]
    print(f"{len(missing)} runs to train", flush=True)
    work(missing, given.jobs, time.monotonic() + 60 * given.minutes)


def cells(phase: str) -> Iterator[Cell]:
    """Yield the runs of a phase, seed by seed: an interrupted study has complete seeds."""
    plan = ARMS["phases"][phase]
    for seed, (model, arms) in itertools.product(plan["seeds"], plan["models"].items()):
        for arm in arms:
            yield Cell(model, arm, plan["size"], plan["steps"], seed)


def done() -> set[Cell]:
    """Return the runs in runs.csv."""
    if not TABLE.exists():
        return set()
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {
            Cell(row["model"], row["arm"], row["size"], int(row["steps"]), int(row["seed"]))
            for row in csv.DictReader(file)
        }


def work(missing: list[Cell], jobs: int, until: float) -> None:
    """Train the missing runs, `jobs` at a time; start none after `until` (monotonic seconds)."""
    waiting, running, failed = list(missing), {}, 0
    while running or (waiting and time.monotonic() < until):
        while waiting and len(running) < jobs and time.monotonic() < until:
            cell = waiting.pop(0)
            words = [f"--{name}={value}" for name, value in asdict(cell).items()]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-W", "ignore", __file__, "one", *words]
            running[subprocess.Popen(command, env=environment)] = cell
        time.sleep(0.2)
        for process in [process for process in running if process.poll() is not None]:
            cell = running.pop(process)
            failed += process.returncode != 0
            print(f"{cell}: {'failed' if process.returncode else 'done'}", flush=True)
    if failed:
        sys.exit(f"{failed} runs failed. The same command tries them again.")


def train(cell: Cell) -> TrainedCell:
    """Train a run, delete its folder, and return its row."""
    project = Project.here()
    start = time.monotonic()
    folder = RunFolder(Path(run(project, cell.config, report=lambda text: None).run))
    metrics = folder.read_metrics()
    sqnr = measured(folder)
    curve, losses = metrics[VALID_LOSS], [loss for _, loss in metrics[TRAIN_LOSS][-TAIL:]]
    last = [loss for step, loss in curve if step == curve[-1][0]]
    shutil.rmtree(folder.root)
    return TrainedCell(
        **asdict(cell),
        validation=statistics.fmean(last),
        training=statistics.fmean(losses),
        curve=json.dumps([[step, round(loss, 6)] for step, loss in curve]),
        seconds=round(time.monotonic() - start, 1),
        date=datetime.date.today().isoformat(),
        commit=commit(project),
        upstream=Pin.load(project.upstream_pin).version,
        torch=importlib.metadata.version("torch"),
        sqnr=json.dumps(sqnr),
        noise_ratio=noise_ratio(metrics),
    )


def measured(folder: RunFolder) -> dict[str, float]:
    """Return the SQNR of each operand in dB, from signal and noise summed over layers."""
    energies: dict[str, list[float]] = {}
    for row in json.loads(folder.quant_stats.read_text(encoding="utf-8")):
        total = energies.setdefault(f"{row['site']}.{row['operand']}", [0.0, 0.0])
        total[0] += float(row["signal"])
        total[1] += float(row["noise"])
    return {
        name: round(10 * math.log10(signal / noise), 2)
        for name, (signal, noise) in sorted(energies.items())
        if signal > 0 and noise > 0
    }


def noise_ratio(metrics: Mapping[str, Series]) -> float | None:
    """Return the geometric mean over layers of the last gradient to noise ratio; None without."""
    series = [values for name, values in metrics.items() if name.endswith("/noise_ratio")]
    last = max((values[-1][0] for values in series), default=None)
    ratios = [values[-1][1] for values in series if values[-1][0] == last]
    return round(statistics.geometric_mean(ratios), 4) if ratios else None


def commit(project: Project) -> str:
    """Return the commit, with a + if files that a training reads have changed."""
    git = ["git", "-C", str(project.root)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    read = ["Megatron-LM", "patches", "tools", "benchmarks/study", f":!{TABLE}"]
    status = [*git, "status", "--porcelain", "--", *read]
    changed = subprocess.run(status, capture_output=True, text=True).stdout
    return head.stdout.strip() + ("+" if changed.strip() else "")


def append(row: TrainedCell) -> None:
    """Append a row to runs.csv, under a lock: other processes append, too."""
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, [field.name for field in fields(TrainedCell)])
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(asdict(row))


if __name__ == "__main__":
    main()
