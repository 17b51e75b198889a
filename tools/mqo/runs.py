"""A run folder: the names of what a run keeps, and how to read it. Needs nothing but the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.errors import RunError

TRAIN_LOSS, VALID_LOSS, KD_LOSS = "lm loss", "lm loss validation", "kd loss"
STEP_TIME = "iteration-time"  # in seconds
Series = list[tuple[int, float]]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    `mqo` writes command.sh, cell.json, environment.json, quant.toml, overlay.diff, source/,
    coverage.json and coverage.txt before the run, log.txt during it and result.json after it; the
    training program writes metrics.jsonl, quant_stats.json, implementation.json, device.json,
    failure.txt, dumps/, tensorboard/ and checkpoints/.
    """

    root: Path

    source = property(lambda self: self.root / "source")
    overlay_diff = property(lambda self: self.root / "overlay.diff")
    quant_config = property(lambda self: self.root / "quant.toml")
    command = property(lambda self: self.root / "command.sh")
    cell = property(lambda self: self.root / "cell.json")
    environment = property(lambda self: self.root / "environment.json")
    log = property(lambda self: self.root / "log.txt")
    metrics = property(lambda self: self.root / "metrics.jsonl")
    quant_stats = property(lambda self: self.root / "quant_stats.json")
    device = property(lambda self: self.root / "device.json")
    implementation = property(lambda self: self.root / "implementation.json")
    failure = property(lambda self: self.root / "failure.txt")
    result = property(lambda self: self.root / "result.json")
    coverage = property(lambda self: self.root / "coverage.json")
    coverage_table = property(lambda self: self.root / "coverage.txt")
    checkpoints = property(lambda self: self.root / "checkpoints")
    dumps = property(lambda self: self.root / "dumps")
    tensorboard = property(lambda self: self.root / "tensorboard")

    def read_metrics(self) -> Mapping[str, Series]:
        """{metric: [(iteration, value)]}; values written as "nan" or "inf" are floats again.

        A last line cut short by a killed run does not count.
        """
        found: dict[str, Series] = {}
        text = self.metrics.read_text(encoding="utf-8") if self.metrics.exists() else ""
        for line in text.splitlines(keepends=True):
            # Histograms are no series; a last line may be torn.
            if line.endswith("\n") and "value" in (row := json.loads(line)):
                found.setdefault(row["name"], []).append((row["iteration"], float(row["value"])))
        return found

    def read_implementation(self) -> Mapping[str, str]:
        """{"norms", "optimizers", "fusions"}: the names of what the run took, with commas between.

        Empty where the run recorded none.
        """
        if not self.implementation.exists():
            return {}
        table = json.loads(self.implementation.read_text(encoding="utf-8"))
        return {kind: ", ".join(names) or "none" for kind, names in table.items()}


def training_losses(metrics: Mapping[str, Series]) -> Series:
    """What a run was trained on, step by step; empty where it recorded nothing.

    A student that learns from its teacher alone has no loss on its text.
    """
    return metrics.get(TRAIN_LOSS) or metrics.get(KD_LOSS, [])


def last_of_each_step(series: Series) -> Series:
    """One value for each step, the last one that was recorded, in the order of the steps.

    Upstream validates again when the training is done, on the batches that follow: the last step
    has two validation losses where it is also a step of --eval-interval, and the final one counts.
    """
    return sorted(dict(series).items())


def checkpoints_of(path: Path) -> Path:
    """The folder of checkpoints that `path` means: where that run saved, or `path` itself."""
    run = RunFolder(path.resolve())
    if run.cell.is_file():
        given = json.loads(run.cell.read_text(encoding="utf-8")).get("checkpoint")
        return Path(given) if given else run.checkpoints
    return run.checkpoints if run.checkpoints.is_dir() else run.root


def run_of(path: Path) -> RunFolder | None:
    """Return the run that `path` belongs to: a run's folder, or its checkpoints; None of others."""
    path = path.resolve()
    for root in (path, path.parent):
        run = RunFolder(root)
        if run.cell.is_file() and path in (run.root, run.checkpoints):
            return run
    return None


class MetricsTail:
    """Reads a metrics.jsonl that is being written: `rows` gives what came since the last call."""

    def __init__(self, path: Path) -> None:
        self.path, self.read = path, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The new rows, whole ones alone; none while there is no file."""
        if not self.path.exists() or self.path.stat().st_size <= self.read:
            return
        with self.path.open("rb") as lines:
            lines.seek(self.read)
            for text in lines:
                if not text.endswith(b"\n"):
                    break
                self.read += len(text)
                yield json.loads(text)


def latest(runs: Path) -> RunFolder:
    """The newest run that recorded metrics; RunError when there is none."""
    found = [RunFolder(path) for path in sorted(runs.glob("*")) if path.is_dir()]
    for run in reversed(found):
        if run.metrics.exists():
            return run
    raise RunError(
        f"{runs} holds no run with metrics",
        expected="at least one",
        help="script/train_config.py starts one",
    )
