"""Find the program for a run's flags: pretrain_gpt.py, or distill_gpt.py with a teacher."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

TEACHER = "--export-kd-teacher-load"


class Program(NamedTuple):
    """What a program passes to the trainer: its forward step, and further flags."""

    forward_step: Callable[..., tuple]
    extra_args: Callable | None = None


def program(flags: Sequence[str]) -> Program:
    """Return the program for the flags."""
    if not any(word.partition("=")[0] == TEACHER for word in flags):
        from megatron.inference.gpt import pretraining

        return Program(pretraining.forward_step)
    import distill_gpt
    from megatron.inference.arguments import add_modelopt_args
    from megatron.inference.gpt import model_provider, teacher_config

    # Only a teacher's sizes are needed, so a folder that names them is enough.
    teacher_config.checkpoint_folder = Path
    model_provider.load_teacher = lambda teacher, args: teacher
    distill_gpt.balance_steps()
    return Program(distill_gpt.forward_step, add_modelopt_args)
