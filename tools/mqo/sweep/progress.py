"""How far a run is, read from the metrics that it writes."""

from __future__ import annotations

from mqo.launch.flags import length
from mqo.runs import STEP_TIME, TRAIN_LOSS, VALID_LOSS, MetricsTail, RunFolder
from mqo.sweep.cells import Job


class Progress:
    """The last step and losses of a run, and its speed."""

    def __init__(self, job: Job, run: RunFolder) -> None:
        whole = length(job.cell)
        self.steps, self._tokens = whole.steps, whole.tokens_per_step
        self._tail = MetricsTail(run.metrics)
        self.step = 0
        self.loss: float | None = None
        self.valid: float | None = None
        self._step_s: float | None = None

    def update(self) -> None:
        """Read what is new."""
        for row in self._tail.rows():
            if row["name"] == TRAIN_LOSS:
                self.step, self.loss = row["iteration"], float(row["value"])
            elif row["name"] == VALID_LOSS:
                self.valid = float(row["value"])
            elif row["name"] == STEP_TIME:
                seconds = float(row["value"])
                # Smoothed: a busy machine's steps differ much.
                self._step_s = seconds if self._step_s is None else (4 * self._step_s + seconds) / 5

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of late; None before there are two steps."""
        return self._tokens / self._step_s if self._step_s else None

    @property
    def seconds_left(self) -> float | None:
        """Until the last step; None before there are two steps."""
        return self._step_s * max(0, self.steps - self.step) if self._step_s else None

    def line(self) -> str:
        """In words."""
        parts = [f"step {self.step}/{self.steps}"]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"validation loss {self.valid:.4f}"] if self.valid is not None else []
        return "  ".join(parts)
