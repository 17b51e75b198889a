"""Send runs to MLflow: the server or folder in MLFLOW_TRACKING_URI, or the folder `mlruns`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from mqo.extras import package
from mqo.project import Project
from mqo.runs import RunFolder
from mqo.track import content
from mqo.track.tracker import MetricRow, Sent, Status

T = TypeVar("T")
GROUP = "group"
# MLflow's usage reports are off; without the second variable it refuses folders.
_VARIABLES = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
_LIMITS = {"metrics": 1000, "params": 100}  # of one request
_PASSWORD = re.compile(r"//[^/@]*@")
_FORBIDDEN = re.compile(r"[^\w.\-:/ ]")  # in names


class Mlflow:
    """A run in MLflow, which has no groups: the sweep is a tag, by which its page can group."""

    def __init__(self) -> None:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        self.entities = package("mlflow.entities")
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or Project.here().mlruns.as_uri()
        # The client itself, not `mlflow.start_run`: that adds the user, command and git commit.
        self.client = package("mlflow.tracking").MlflowClient(self.uri)

    def create(self, run: RunFolder) -> str:
        """Create the run, and its experiment if that is missing."""
        group = content.group_of(run)
        tags = {GROUP: group} if group else {}
        created = self.client.create_run(self._experiment(), run_name=run.root.name, tags=tags)
        return created.info.run_id

    def _experiment(self) -> str:
        """Return the experiment's id; concurrent jobs of a sweep create it only once."""
        name, cache = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mqo"), Project.here().cache
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "mlflow.lock"):
            experiment = self.client.get_experiment_by_name(name)
            return experiment.experiment_id if experiment else self.client.create_experiment(name)

    def open(self, run: RunFolder, before: Sent) -> Sent:
        """Open or create the run; return it with the number of rows that the store has."""
        self.id = before.id if self._reopened(before.id) else self.create(run)
        for part in _parts(content.parameters(run).items(), _LIMITS["params"]):
            params = [self.entities.Param(_allowed(key), str(value)) for key, value in part]
            self.client.log_batch(self.id, params=params)
        return Sent(self.id, self._rows())

    def _reopened(self, id: str) -> bool:
        """Set the run's status to running again; return whether the store has the run."""
        errors = package("mlflow.exceptions")
        try:
            self.client.update_run(id, status="RUNNING")
        except errors.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def _rows(self) -> int:
        names = self.client.get_run(self.id).data.metrics
        return sum(len(self.client.get_metric_history(self.id, name)) for name in names)

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Log values in as few requests as MLflow allows."""
        now = int(time.time() * 1000)
        for part in _parts(rows, _LIMITS["metrics"]):
            metrics = [
                self.entities.Metric(_allowed(row.name), row.value, now, row.iteration)
                for row in part
            ]
            self.client.log_batch(self.id, metrics=metrics)

    def attach(self, kind: str, files: Sequence[Path]) -> None:
        """Log the files into the folder `kind` of the artifacts."""
        for file in files:
            self.client.log_artifact(self.id, str(file), kind)

    def picture(self, name: str, file: Path) -> None:
        """Log the picture as an artifact, which MLflow's page shows."""
        self.client.log_artifact(self.id, str(file), "pictures")

    def end(self, status: Status) -> str:
        """Set the run's status."""
        self.client.set_terminated(self.id, "FINISHED" if status == "finished" else "FAILED")
        return f"run {self.id} in {_PASSWORD.sub('//', self.uri)}"


def _allowed(name: str) -> str:
    return _FORBIDDEN.sub("_", name)


def _parts(values: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part
