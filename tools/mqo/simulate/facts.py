"""Read a simulated rank's memory, work and exchanges, for any number of micro-batches.

Megatron-LM/tools/simulate.py writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, PlainValidator, TypeAdapter

from mqo.megatron.simulation.rows import Exchange, Work


class Alive(BaseModel):
    """Tensors of one source line that are alive at the peak."""

    kind: str
    line: str
    bytes: int
    tensors: int


Row = TypeVar("Row", Work, Exchange)
Counts = dict[Row, float]


def _counted(kind: type[Row], rows: Iterable[dict[str, Any]]) -> Counts[Row]:
    """Return the number of calls of each row."""
    read, counts = TypeAdapter(kind), Counts[Row]()
    for row in rows:
        key = read.validate_python({name: row[name] for name in kind._fields if name in row})
        counts[key] = counts.get(key, 0) + row["calls"]
    return counts


class Step(BaseModel):
    """The work and the exchanges of a step with this number of micro-batches."""

    micro_batches: int
    works: Annotated[Counts[Work], PlainValidator(partial(_counted, Work))]
    exchanges: Annotated[Counts[Exchange], PlainValidator(partial(_counted, Exchange))]


class RankFacts(BaseModel):
    """A rank's position, weights and memory in bytes, and its last two steps.

    `step_peaks` are of all steps; `timeline` has the bytes of each kind at some operations.
    """

    rank: int
    world: int
    stage: int
    stages: int
    chunks: int
    micro_batch: int
    sequence: int
    data: int
    global_batch: int
    parameters: int
    setup_peak: int
    step_peaks: list[int]
    peak: int
    kinds: dict[str, int]
    at_peak: list[Alive]
    timeline: dict[str, Any]
    steps: list[Step]

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step of the run."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def is_steady(self) -> bool:
        """Return whether further micro-batches would need no more memory."""
        last = self.step_peaks[-2:]
        simulated = self.steps[-1].micro_batches
        return simulated >= self.micro_batches or max(last) - min(last) < 1e-3 * max(last)

    def works(self) -> dict[Work, float]:
        """Return the number of calls of each operation in a step of the run."""
        return self._whole([step.works for step in self.steps])

    def exchanges(self) -> dict[Exchange, float]:
        """Return the number of calls of each exchange in a step of the run."""
        return self._whole([step.exchanges for step in self.steps])

    def _whole(self, counts: list[Counts[Row]]) -> Counts[Row]:
        """Return the last step's counts plus those of further micro-batches."""
        fewer, more = counts[0], counts[-1]
        step = self.steps[-1].micro_batches - self.steps[0].micro_batches
        further = self.micro_batches - self.steps[-1].micro_batches
        scale = further / step if step > 0 and further > 0 else 0.0
        calls_by_row = {
            row: more.get(row, 0) + scale * (more.get(row, 0) - fewer.get(row, 0))
            for row in {**fewer, **more}
        }
        return {row: calls for row, calls in calls_by_row.items() if calls > 0}
