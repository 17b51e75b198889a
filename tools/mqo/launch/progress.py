"""Track the progress of a run in the metrics that it writes."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path
from typing import Any

from mqo.display import facts
from mqo.launch.command import read_flags
from mqo.launch.config import Experiment
from mqo.launch.flags import length
from mqo.runs import KD_LOSS, STEP_TIME, TRAIN_LOSS, VALID_LOSS, MetricsTail

RECENT = 20  # step times to take the median of, because they vary on a busy machine


class Progress:
    """The last step and losses of a run, and its speed over the last steps."""

    def __init__(self, experiment: Experiment, metrics: Path) -> None:
        whole = length(experiment)
        self.steps, self._tokens = whole.steps, whole.tokens_per_step
        self._exit = read_flags(experiment.extra_flags, {"exit-interval": 0}).exit_interval
        self._loss, self._tail = loss_name(experiment), MetricsTail(metrics)
        self.step = 0
        self.loss: float | None = None
        self.valid: float | None = None
        self._validated = -1
        self._times: deque[float] = deque(maxlen=RECENT)

    def update(self) -> list[str]:
        """Read new metrics; return lines for the first step, each validation and the last step."""
        return [line for row in self._tail.rows() for line in self._row(row)]

    def _row(self, row: dict[str, Any]) -> list[str]:
        name, step = row["name"], row["iteration"]
        if name == self._loss:
            first, self.step, self.loss = not self.step, step, row["value"]
            return [self.line()] if first or step == self._last else []
        if name == VALID_LOSS:
            # At the end of the training upstream validates again, on later batches.
            final = "final " if step == self._validated else ""
            self._validated, self.valid = step, row["value"]
            return [f"{self._at(step)}  {final}validation loss {self.valid:.4f}"]
        if name == STEP_TIME:
            self._times.append(row["value"])
        return []

    @property
    def _last(self) -> int:
        """Return the last step of the run: --exit-interval stops at its next multiple."""
        if not self._exit:
            return self.steps
        return min(self.steps, self._exit * max(1, -(-self.step // self._exit)))

    @property
    def _step_s(self) -> float | None:
        return statistics.median(self._times) if self._times else None

    @property
    def tokens_per_s(self) -> float | None:
        """Return tokens per second over the last steps; None before the second step."""
        return self._tokens / self._step_s if self._step_s else None

    @property
    def seconds_left(self) -> float | None:
        """Return the time to the last step without validations; None before the second step."""
        return self._step_s * max(0, self._last - self.step) if self._step_s else None

    def line(self) -> str:
        """Return step, loss, speed and time left, if known."""
        if self.loss is None:
            return f"{self._at(self.step)}  starting"
        left = None if self.step >= self._last else self.seconds_left
        loss = f"loss {self.loss:.4f}"
        return facts(self._at(self.step), loss, per_s=self.tokens_per_s, left=left)

    def losses(self) -> str:
        """Return step and both losses."""
        valid = "" if self.valid is None else f"validation loss {self.valid:.4f}"
        loss = "" if self.loss is None else f"loss {self.loss:.4f}"
        return facts(self._at(self.step), loss, valid)

    def _at(self, step: int) -> str:
        return f"  step {step:>6}/{self.steps}"


def loss_name(experiment: Experiment) -> str:
    """Return the name of the training loss; a student may train only on the distillation loss."""
    return KD_LOSS if experiment.teacher else TRAIN_LOSS
