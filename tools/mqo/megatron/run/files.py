"""The names of the files in a run folder and of checkpoints, and what JSON can hold.

This module imports only the standard library, because commands do not load torch.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUANTIZERS = "quantizers of libraries"  # the key of implementation.json
# An attribute of the arguments in a checkpoint: the name of ModelOpt's format, if
# examples/export quantized the model.
MODELOPT_FORMAT = "mqo_modelopt_format"
MODELOPT_STATE = "modelopt_state"  # the folder of ModelOpt's state in an iteration's folder
# Upstream's names: of the file with the iteration of the newest checkpoint, or with the name of a
# model without an iteration, which is also its folder.
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
MOST_DIGITS = 18  # of an iteration
_FOLDER = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class RunFiles:
    """The files and folders of one run.

    `mqo` writes command.sh, cell.json, environment.json, origin.txt, quant.toml, overlay.diff,
    source/, plugins/, coverage.json and coverage.txt before the run, log.txt during it and
    result.json after it; the training program writes metrics.jsonl, quant_stats.json,
    implementation.json, device.json, failure.txt, packages.json, ended.json, dumps/, tensorboard/
    and checkpoints/. With a tracker there are trackers.json, tracker.txt and the tracker's own
    files, such as wandb/.
    """

    root: Path

    source = property(lambda self: self.root / "source")
    overlay_diff = property(lambda self: self.root / "overlay.diff")
    plugins = property(lambda self: self.root / "plugins")
    quant_config = property(lambda self: self.root / "quant.toml")
    command = property(lambda self: self.root / "command.sh")
    config = property(lambda self: self.root / "cell.json")
    origin = property(lambda self: self.root / "origin.txt")
    environment = property(lambda self: self.root / "environment.json")
    log = property(lambda self: self.root / "log.txt")
    metrics = property(lambda self: self.root / "metrics.jsonl")
    quant_stats = property(lambda self: self.root / "quant_stats.json")
    device = property(lambda self: self.root / "device.json")
    implementation = property(lambda self: self.root / "implementation.json")
    failure = property(lambda self: self.root / "failure.txt")
    packages = property(lambda self: self.root / "packages.json")
    ended = property(lambda self: self.root / "ended.json")
    result = property(lambda self: self.root / "result.json")
    coverage = property(lambda self: self.root / "coverage.json")
    coverage_table = property(lambda self: self.root / "coverage.txt")
    checkpoints = property(lambda self: self.root / "checkpoints")
    dumps = property(lambda self: self.root / "dumps")
    trackers = property(lambda self: self.root / "trackers.json")
    tracker_log = property(lambda self: self.root / "tracker.txt")
    tensorboard = property(lambda self: self.root / "tensorboard")


def run_folder() -> RunFiles | None:
    """Return the folder of this run's quant.toml; None for a run without one."""
    from mqo.quant.options import ENVIRONMENT_VARIABLE  # imports torch, which mqo does not need

    path = os.environ.get(ENVIRONMENT_VARIABLE)
    return RunFiles(Path(path).parent) if path else None


def iteration_folder(folder: Path, iteration: int | str) -> Path:
    """Return the folder of an iteration's checkpoint, as upstream names it; also of RELEASE."""
    text = str(iteration)
    return folder / (f"iter_{int(text):07d}" if text.isdecimal() else text)


def iteration_of(folder: Path) -> int | None:
    """Return the iteration in a checkpoint's folder name; None for other names, as RELEASE."""
    name = _FOLDER.fullmatch(folder.name)
    return int(name[1]) if name else None


def jsonable(value: Any) -> Any:
    """Return `value` in a form that JSON can hold: text for NaN and other values that it cannot."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return [jsonable(item) for item in value] if isinstance(value, Iterable) else str(value)
