"""The current training step, from which random seeds and schedules are derived."""

from dataclasses import dataclass


@dataclass
class Progress:
    """The step of a model: the number of completed steps, and their total if known.

    `began` counts the calls of `set_step`, which distinguishes steps with the same number.
    """

    step: int = 0
    total: int | None = None
    began: int = 0

    def set_step(self, step: int, total: int | None = None) -> None:
        """Set the step, and the total if it is not None. The count of micro-batches restarts."""
        self.step = int(step)
        self.began += 1
        if total is not None:
            self.total = int(total)


# That of the model that Megatron trains in this process.
PROGRESS = Progress()
set_step = PROGRESS.set_step
