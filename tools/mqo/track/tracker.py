"""What an experiment tracker is told of a run; each tracker has a file of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

Status = Literal["finished", "failed"]
Value = str | int | float | bool


class Row(NamedTuple):
    """A value of metrics.jsonl; the names are those of TensorBoard."""

    iteration: int
    name: str
    value: float


@dataclass(frozen=True)
class Run:
    """A run as it begins: `group` is the sweep that it belongs to, `folder` its run folder."""

    name: str
    group: str | None
    parameters: Mapping[str, Value]
    folder: Path


@dataclass(frozen=True)
class Sent:
    """What a tracker has of a run: under which id, and how many rows of its metrics.

    `status` is None until the tracker was told the end.
    """

    id: str
    rows: int = 0
    status: Status | None = None


class Tracker(Protocol):
    """A tracker, for one run. What its methods raise is reported as its failure."""

    def create(self, run: Run) -> str:
        """Return the id of a new run, which is noted before anything else is sent."""

    def open(self, run: Run, before: Sent) -> Sent:
        """Open the run; return the part of `before` that it has."""

    def log(self, rows: Sequence[Row]) -> None:
        """Take values, in the order of metrics.jsonl; a name may come twice at an iteration."""

    def attach(self, kind: str, files: Sequence[Path]) -> None:
        """Take files under their names. Those of a kind that it has already are replaced."""

    def picture(self, name: str, file: Path) -> None:
        """Take a picture to show."""

    def end(self, status: Status) -> str:
        """Close the run; return where it is, in words."""
