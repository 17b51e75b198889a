"""Define the interface of experiment trackers; each tracker has its own module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from mqo.runs import RunFolder

Status = Literal["finished", "failed"]


class MetricRow(NamedTuple):
    """A value in metrics.jsonl, with its name in TensorBoard."""

    iteration: int
    name: str
    value: float


@dataclass(frozen=True)
class Sent:
    """The part of a run that a tracker has: its id there, and the number of rows of metrics.

    `status` is None until the tracker knows that the run ended.
    """

    id: str
    rows: int = 0
    status: Status | None = None


class Tracker(Protocol):
    """A tracker, for one run. Errors of its methods are reported as its failure."""

    def create(self, run: RunFolder) -> str:
        """Return the id of a new run, which is recorded before anything else is sent."""

    def open(self, run: RunFolder, before: Sent) -> Sent:
        """Open the run; return the part of `before` that it has."""

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Send values in the order of metrics.jsonl; a name may occur twice at an iteration."""

    def attach(self, kind: str, files: Sequence[Path]) -> None:
        """Send files under their names, replacing earlier files of the same kind."""

    def picture(self, name: str, file: Path) -> None:
        """Send a picture."""

    def end(self, status: Status) -> str:
        """Close the run; return its address as text."""
