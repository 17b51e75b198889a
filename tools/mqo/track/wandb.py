"""Send runs to Weights & Biases, which reads WANDB_MODE, WANDB_PROJECT and its other variables."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mqo.errors import TrackerError
from mqo.extras import package
from mqo.runs import RunFolder
from mqo.track import content
from mqo.track.tracker import MetricRow, Sent, Status

STEP = "iteration"
# Its usage reports are off, and it must not ask for a login at a terminal.
_VARIABLES = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


class Wandb:
    """A run in Weights & Biases; offline it is stored in the run folder."""

    def create(self, run: RunFolder) -> str:
        """Return a new id, which W&B lets its users choose."""
        return secrets.token_hex(4)

    def open(self, run: RunFolder, before: Sent) -> Sent:
        """Open the run; an offline run is written again, because nothing can be added to it."""
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        self.wandb = package("wandb")
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mqo"),
            name=run.root.name,
            group=content.group_of(run),
            id=before.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", run.root),
            config=content.parameters(run),
            settings=settings(self.wandb),
        )
        if self.run.disabled:
            raise TrackerError("WANDB_MODE is 'disabled'", expected="online or offline")
        if self.run.offline:
            _remove_older(Path(self.run.dir).parent, before.id)
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        return Sent(before.id, before.rows if self.run.resumed else 0)

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Log the values of each iteration together; sending continues in the background."""
        for iteration, values in _together(rows):
            self.run.log({STEP: iteration, **values})

    def attach(self, kind: str, files: Sequence[Path]) -> None:
        """Log an artifact with the files."""
        artifact = self.wandb.Artifact(f"{kind}-{self.run.id}", type=kind)
        for file in files:
            artifact.add_file(str(file), name=file.name)
        self.run.log_artifact(artifact)

    def picture(self, name: str, file: Path) -> None:
        """Log the picture as an image."""
        self.run.log({f"pictures/{name}": self.wandb.Image(str(file))})

    def end(self, status: Status) -> str:
        """Wait until everything is written, or online until it is sent."""
        self.run.finish(exit_code=0 if status == "finished" else 1)
        self.wandb.teardown()  # returns when the last records are on the disk
        if self.run.offline:
            sync = f"wandb sync '{Path(self.run.dir).parent}'"
            return f"run {self.run.id}, offline: `{sync}` sends it"
        return f"run {self.run.id}, {self.run.url}"


def settings(wandb: Any) -> Any:
    """Return settings that leave out the command, code, host and load of this process."""
    return wandb.Settings(
        console="off",
        save_code=False,
        disable_code=True,
        disable_git=True,
        host="",
        silent=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )


def _together(rows: Sequence[MetricRow]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the values of each iteration; a repeated name begins another group of the iteration."""
    for iteration, group in itertools.groupby(rows, key=lambda row: row.iteration):
        values: dict[str, float] = {}
        for row in group:
            if row.name in values:
                yield iteration, values
                values = {}
            values[row.name] = row.value
        yield iteration, values


def _remove_older(current: Path, id: str) -> None:
    """Remove the files of earlier attempts at this run."""
    for file in current.parent.glob(f"offline-run-*/run-{id}.wandb"):
        if file.parent != current:
            shutil.rmtree(file.parent)
