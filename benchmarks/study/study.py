"""Trains the arms of the study that runs.csv lacks, a row a run; the same command again goes on.

    .venv/bin/python benchmarks/study/study.py pilot --size h128 --steps 300 [--minutes 20]

Runs of one seed have the same initial weights, data and order: they differ in what is quantized
alone. Each is trained on one core, by the launcher, in a process of its own. A row holds what it
takes to train it again: model, arm, size, steps, seed, commit, versions; and its validation losses.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import fcntl
import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mqo.launch.config import RunConfig, resolve
from mqo.launch.run import run
from mqo.overlay.vendor import Pin
from mqo.project import Project
from mqo.recipes import recipe as recipes
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder

HERE = Path(__file__).parent
TABLE = HERE / "runs.csv"
ARMS = tomllib.loads((HERE / "arms.toml").read_text(encoding="utf-8"))
BATCH = 4  # sequences of a step, in the configuration `study`
TAIL = 20  # steps whose mean is the training loss


@dataclass(frozen=True)
class Cell:
    """What is to be trained."""

    model: str
    arm: str
    size: str
    steps: int
    seed: int

    @property
    def config(self) -> RunConfig:
        """Return the run's configuration: `study`, at this size and length."""
        arm = ARMS["arms"][self.arm]
        flags = (
            *ARMS["sizes"][self.size]["flags"].split(),
            *("--train-samples", str(self.steps * BATCH), "--seed", str(self.seed)),
        )
        rest: dict[str, Any] = {"extra_flags": flags, "exclude": ("output_layer",)}
        if "recipe" in arm:
            recipe = recipes.chosen(arm["recipe"], arm.get("without", ()), arm.get("with", ()))
            rest |= {"recipe": recipe}
        elif arm["mode"] != "bf16":
            rest |= {"gemms": "all", **arm.get("options", {})}
        else:
            rest.pop("exclude")
        if "schedule" in arm:
            rest["schedule"] = tuple(arm["schedule"])
        return resolve(self.model, "dolma", arm.get("mode", "bf16"), "study", **rest)


@dataclass(frozen=True)
class Row(Cell):
    """What was trained, and what came of it; losses in nats per token."""

    validation: float
    training: float
    curve: str  # [[step, validation loss], ...]
    seconds: float
    date: str
    commit: str
    upstream: str
    torch: str


def main() -> None:
    """Train what is missing, or one cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("phase", choices=[name for name in ARMS if "arms" in ARMS[name]] + ["one"])
    parser.add_argument("--size", choices=ARMS["sizes"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="start none after these")
    parser.add_argument("--model", help="of `one`")
    parser.add_argument("--arm", help="of `one`")
    parser.add_argument("--seed", type=int, help="of `one`")
    given = parser.parse_args()
    if given.phase == "one":
        append(train(Cell(given.model, given.arm, given.size, given.steps, given.seed)))
        return
    missing = [cell for cell in cells(given.phase, given.size, given.steps) if cell not in done()]
    print(f"{len(missing)} runs to train", flush=True)
    work(missing, given.jobs, time.monotonic() + 60 * given.minutes)


def cells(phase: str, size: str, steps: int) -> Iterator[Cell]:
    """Yield a phase's cells, seed by seed: what is there is of use at any time."""
    of = ARMS[phase]
    for seed, model, arm in itertools.product(of["seeds"], of["models"], of["arms"]):
        yield Cell(model, arm, size, steps, seed)


def done() -> set[Cell]:
    """Return what runs.csv has."""
    if not TABLE.exists():
        return set()
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {
            Cell(row["model"], row["arm"], row["size"], int(row["steps"]), int(row["seed"]))
            for row in csv.DictReader(file)
        }


def work(missing: list[Cell], jobs: int, until: float) -> None:
    """Train cells, `jobs` at once, none begun after `until`."""
    waiting, running, failed = list(missing), {}, 0
    while running or (waiting and time.monotonic() < until):
        while waiting and len(running) < jobs and time.monotonic() < until:
            cell = waiting.pop(0)
            words = [f"--{name}={value}" for name, value in asdict(cell).items()]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-W", "ignore", __file__, "one", *words]
            running[subprocess.Popen(command, env=environment)] = cell
        time.sleep(0.2)
        for process in [one for one in running if one.poll() is not None]:
            cell = running.pop(process)
            failed += process.returncode != 0
            print(f"{cell}: {'failed' if process.returncode else 'done'}", flush=True)
    if failed:
        sys.exit(f"{failed} runs failed")


def train(cell: Cell) -> Row:
    """Train a cell; its run folder goes."""
    project = Project.here()
    start = time.monotonic()
    folder = RunFolder(Path(run(project, cell.config, report=lambda text: None).run))
    metrics = folder.read_metrics()
    curve, losses = metrics[VALID_LOSS], [loss for _, loss in metrics[TRAIN_LOSS][-TAIL:]]
    shutil.rmtree(folder.root)
    return Row(
        **asdict(cell),
        validation=curve[-1][1],
        training=sum(losses) / len(losses),
        curve=json.dumps([[step, round(loss, 6)] for step, loss in curve]),
        seconds=round(time.monotonic() - start, 1),
        date=datetime.date.today().isoformat(),
        commit=commit(project),
        upstream=Pin.load(project.upstream_pin).version,
        torch=importlib.metadata.version("torch"),
    )


def commit(project: Project) -> str:
    """Return the commit, with a + where files differ that a training reads."""
    git = ["git", "-C", str(project.root)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    read = ["Megatron-LM", "patches", "tools", "benchmarks/study/arms.toml"]
    status = [*git, "status", "--porcelain", "--", *read]
    changed = subprocess.run(status, capture_output=True, text=True).stdout
    return head.stdout.strip() + ("+" if changed.strip() else "")


def append(row: Row) -> None:
    """Add a row to the table, which other processes add to, too."""
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(asdict(row))


if __name__ == "__main__":
    main()
