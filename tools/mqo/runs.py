"""A run folder, and how to read it. Needs nothing but the folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mqo.errors import RunError
from mqo.output import new_file
from mqo.run_records import damaged, parsed
from mqo.torch_free import load
from mqo.untrusted import UntrustedFileError, parse_json, read_lines

TRAIN_LOSS, VALID_LOSS, KD_LOSS = "lm loss", "lm loss validation", "kd loss"
STEP_TIME = "iteration-time"  # in seconds
MOST_STEPS = 1 << 53  # what a float counts exactly
SWEEP = "sweep.json"  # beside the runs of a sweep
Series = list[tuple[int, float]]


_files = load("run.files")
QUANTIZERS: str = _files.QUANTIZERS  # the key of implementation.json


class RunFolder(_files.RunFiles):
    """The folder of one run, and what it says."""

    def read_config(self) -> dict[str, Any]:
        """Return cell.json, by the parts of mqo.launch.config.RunConfig."""
        table = parsed(self.config, dict[str, Any])
        try:
            return table if "experiment" in table else _parts(table)
        except (TypeError, AttributeError) as error:
            raise damaged(self.config, error) from error

    def read_metrics(self) -> Mapping[str, Series]:
        """Return {metric: [(iteration, value)]}; values written as "nan" or "inf" are floats again.

        A last line cut short by a killed run does not count.
        """
        found: dict[str, Series] = {}
        for row in MetricsTail(self.metrics).rows():
            if "value" in row:  # histograms are no series
                found.setdefault(row["name"], []).append((row["iteration"], row["value"]))
        return found

    def read_implementation(self) -> Mapping[str, str]:
        """Return {"norms", "optimizers", "fusions"}: names of what the run took, with commas.

        Empty where the run recorded none.
        """
        if not self.implementation.exists():
            return {}
        table = parsed(self.implementation, dict[str, list[str]])
        return {kind: ", ".join(names) or "none" for kind, names in table.items()}


def _parts(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat cell.json of earlier runs by its parts now."""

    def take(*names: str) -> dict[str, Any]:
        return {name: flat[name] for name in names if name in flat}

    def chosen(**options: Any) -> dict[str, Any]:
        # What nobody chose stood there, too.
        return {k: v for k, v in options.items() if v not in (None, []) and v is not False}

    quantizer = chosen(**flat.get("quantiser", {}), **take("exclude"))
    kept = flat.get("keep_checkpoints") or None
    recorder = chosen(every=flat.get("record_every"), keep_checkpoints=kept)
    recorder |= chosen(**take("dump", "check_nan"))
    weights = ("checkpoint", "tokenizer", "data_prefix", "teacher", "distillation_config")
    return {
        "experiment": take("model", "dataset", "training", "dtype", "extra_flags", *weights),
        "quantization": take("mode", "types", "gemms", "schedule") | {"options": quantizer},
        "placement": take("cluster", "megatron", "layout", "without"),
        "recording": take("tensorboard") | {"options": recorder},
    }


def training_losses(metrics: Mapping[str, Series]) -> Series:
    """Return what a run was trained on, step by step; empty where it recorded nothing.

    A student that learns from its teacher alone has no loss on its text.
    """
    return metrics.get(TRAIN_LOSS) or metrics.get(KD_LOSS, [])


def last_of_each_step(series: Series) -> Series:
    """Return one value for each step, the last one that was recorded, in the order of the steps.

    Upstream validates again when the training is done, on the batches that follow: the last step
    has two validation losses where it is also a step of --eval-interval, and the final one counts.
    """
    return sorted(dict(series).items())


def is_run(folder: Path) -> bool:
    """Return whether a run wrote its configuration into a folder."""
    return RunFolder(folder).config.is_file()


def new_folder(parent: Path, name: str) -> RunFolder:
    """Make the folder of a run; where one of that name is there, with a number behind the name."""
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    while True:
        run = RunFolder(parent / next(names))
        with suppress(FileExistsError):
            run.root.mkdir(parents=True)
            return run


def checkpoints_of(path: Path) -> Path:
    """Return the folder of checkpoints that `path` means: where a run saved, or `path` itself."""
    run = RunFolder(path.resolve())
    if run.config.is_file():
        given = run.read_config()["experiment"].get("checkpoint")
        return Path(given) if given else run.checkpoints
    return run.checkpoints if run.checkpoints.is_dir() else run.root


def run_of(path: Path) -> RunFolder | None:
    """Return the run that `path` belongs to: a run's folder, or its checkpoints; None of others."""
    path = path.resolve()
    for root in (path, path.parent):
        run = RunFolder(root)
        if run.config.is_file() and path in (run.root, run.checkpoints):
            return run
    return None


class MetricsTail:
    """Reads a metrics.jsonl that is being written: `rows` gives what came since the last call."""

    def __init__(self, path: Path) -> None:
        self.path, self.read = path, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the new rows, whole ones alone; none while there is no file.

        A row has `iteration`, `name`, and a `value`, but for histograms; RunError for another.
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
            # A range is asked for a float number by number, which would not end.
            if isinstance(step, int) and step in range(MOST_STEPS) and isinstance(name, str):
                return row
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise damaged(self.path, error) from error
        raise damaged(self.path, f"a row is {text[:80]!r}")


def replace_text(path: Path, text: str) -> None:
    """Write a file; at any time it is the old one or the new one, whole."""
    with new_file(path) as whole:
        whole.write_text(text, encoding="utf-8")


def latest(runs: Path) -> RunFolder:
    """Return the newest run that recorded metrics; RunError when there is none."""
    for run in map(RunFolder, sorted(runs.glob("*"), reverse=True)):
        if run.metrics.exists():
            return run
    raise RunError(
        f"{runs} holds no run with metrics",
        expected="at least one",
        help="script/train_config.py starts one",
    )
