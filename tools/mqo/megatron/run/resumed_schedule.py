"""Refuse to resume by accident with another schedule of learning rate and weight decay."""

from typing import Any

from mqo.megatron.run.unpickle import CheckpointError

KEEP, REPLACE = "--use-checkpoint-opt-param-scheduler", "--override-opt-param-scheduler"


def check_schedule(scheduler: Any, ours: object, theirs: object, name: str) -> None:
    """Compare a value of this run's schedule with its checkpoint's; the patched scheduler calls it.

    Args:
        scheduler: upstream's, with two switches that select one of the two values.
        ours: this run's value; lengths are in samples.
        theirs: the checkpoint's value.
        name: upstream's name for it.

    Raises:
        CheckpointError: they differ, and neither switch is on.
    """
    chosen = scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler
    if chosen or ours == theirs:
        return
    now, was = (f"{v:g}" if isinstance(v, float) else v for v in (ours, theirs))
    raise CheckpointError(
        "the schedule of learning rate and weight decay is not the checkpoint's (a longer training "
        f"changes it): {name} is {now}, and was {was} (lengths are in samples). "
        f"Expected: the checkpoint's. Pass `-- {REPLACE}` to continue with this run's schedule, "
        f"`-- {KEEP}` to continue with the checkpoint's, or give another CHECKPOINT"
    )
