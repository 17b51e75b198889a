"""Read a run folder, without needing anything else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mqo.errors import RunError
from mqo.megatron.run import files
from mqo.output import new_file
from mqo.run_records import damaged, parsed
from mqo.untrusted import UntrustedFileError, parse_json, read_lines

TRAIN_LOSS, VALID_LOSS, KD_LOSS = "lm loss", "lm loss validation", "kd loss"
STEP_TIME = "iteration-time"  # in seconds
MOST_STEPS = 1 << 53  # what a float counts exactly
SWEEP = "sweep.json"  # next to the runs of a sweep
Series = list[tuple[int, float]]
Value = str | int | float | bool


QUANTIZERS: str = files.QUANTIZERS  # the key of implementation.json


class RunFolder(files.RunFiles):
    """The folder of one run, and the content of its files."""

    def read_config(self) -> dict[str, Any]:
        """Return cell.json, a table as mqo.launch.config.RunConfig; RunError for another."""
        table = parsed(self.config, dict[str, Any])
        if not isinstance(table.get("experiment"), dict):
            raise RunError(
                f"{self.config} has no table 'experiment': version 0.1 wrote it, or it is damaged",
                expected="a run of version 0.2 or later",
                help="Read it with version 0.1 (commit 0340fb9)",
            )
        return table

    def read_metrics(self) -> Mapping[str, Series]:
        """Return {metric: [(iteration, value)]}; values written as "nan" or "inf" are floats again.

        A last line that a killed run did not complete is ignored.
        """
        metrics: dict[str, Series] = {}
        for row in MetricsTail(self.metrics).rows():
            if "value" in row:  # histograms are not series
                metrics.setdefault(row["name"], []).append((row["iteration"], row["value"]))
        return metrics

    def read_implementation(self) -> Mapping[str, str]:
        """Return {"norms", "optimizers", "fusions"}: the names that the run used, with commas.

        Empty if the run recorded none.
        """
        if not self.implementation.exists():
            return {}
        table = parsed(self.implementation, dict[str, list[str]])
        return {kind: ", ".join(names) or "none" for kind, names in table.items()}


def training_losses(metrics: Mapping[str, Series]) -> Series:
    """Return the training loss of a run by step; empty if it recorded nothing.

    A student that learned only from its teacher, before 0.3, has only a distillation loss.
    """
    return metrics.get(TRAIN_LOSS) or metrics.get(KD_LOSS, [])


def last_of_each_step(series: Series) -> Series:
    """Return one value for each step, the last one that was recorded, in the order of the steps.

    Upstream validates again when the training is done, on the batches that follow: the last step
    has two validation losses if it is also a step of --eval-interval, and the final one counts.
    """
    return sorted(dict(series).items())


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Value]]:
    """Yield (path with dots, value) of each value; lists become JSON, and None is left out."""
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        elif isinstance(value, list):
            yield name, json.dumps(value)
        elif value is not None:
            yield name, value


def is_run(folder: Path) -> bool:
    """Return whether a run wrote its configuration into a folder."""
    return RunFolder(folder).config.is_file()


def new_folder(parent: Path, name: str) -> RunFolder:
    """Make the folder of a run; append a number if the name is taken."""
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    while True:
        run = RunFolder(parent / next(names))
        with suppress(FileExistsError):
            run.root.mkdir(parents=True)
            return run


def checkpoints_of(path: Path) -> Path:
    """Return the checkpoint folder of `path`: that of a run, or `path` itself."""
    run = RunFolder(path.resolve())
    if run.config.is_file():
        given = run.read_config()["experiment"].get("checkpoint")
        return Path(given) if given else run.checkpoints
    return run.checkpoints if run.checkpoints.is_dir() else run.root


def run_of(path: Path) -> RunFolder | None:
    """Return the run of `path`, which is a run's folder or its checkpoints; None for others."""
    path = path.resolve()
    for root in (path, path.parent):
        run = RunFolder(root)
        if run.config.is_file() and path in (run.root, run.checkpoints):
            return run
    return None


class MetricsTail:
    """Read a metrics.jsonl that is being written: `rows` yields the rows since the last call."""

    def __init__(self, path: Path) -> None:
        self.path, self.read = path, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the new complete rows; none while the file is missing.

        A row has `iteration`, `name`, and, except for histograms, `value`; RunError otherwise.
        """
        if not self.path.exists():
            return
        try:
            for text in read_lines(self.path, self.read):
                if not text.endswith(b"\n"):
                    break
                self.read += len(text)
                yield self._row(text)
        except UntrustedFileError as error:
            raise damaged(self.path, error) from error

    def _row(self, text: bytes) -> dict[str, Any]:
        try:
            row = parse_json(self.path, text)
            if "value" in row:
                row["value"] = float(row["value"])
            step, name = row["iteration"], row["name"]
            # A range compares a float with each number, which would not end.
            if isinstance(step, int) and step in range(MOST_STEPS) and isinstance(name, str):
                return row
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise damaged(self.path, error) from error
        raise damaged(self.path, f"a row is {text[:80]!r}")


def replace_text(path: Path, text: str) -> None:
    """Replace the text of a file; at any time it is complete, old or new."""
    with new_file(path) as whole:
        whole.write_text(text, encoding="utf-8")


def latest(runs: Path) -> RunFolder:
    """Return the newest run that recorded metrics; RunError if there is none."""
    for run in map(RunFolder, sorted(runs.glob("*"), reverse=True)):
        if run.metrics.exists():
            return run
    raise RunError(
        f"{runs} holds no run with metrics",
        expected="at least one",
        help="Run `mqo train`, which trains one",
    )
