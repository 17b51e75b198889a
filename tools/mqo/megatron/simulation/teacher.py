"""Find the program for a run's flags: pretrain_gpt.py, or distill_gpt.py with a teacher."""

from collections.abc import Callable, Sequence
from pathlib import Path

TEACHER = "--export-kd-teacher-load"


def program(flags: Sequence[str]) -> tuple[Callable[..., tuple], Callable | None]:
    """Return the forward step and the further flags of the program for these flags."""
    if not any(word.partition("=")[0] == TEACHER for word in flags):
        from megatron.inference.gpt import pretraining

        return pretraining.forward_step, None
    import distill_gpt
    from megatron.inference.arguments import add_modelopt_args
    from megatron.inference.gpt import model_provider, teacher_config

    # Only a teacher's sizes are needed, so a folder that names them is enough.
    teacher_config.checkpoint_folder = Path
    model_provider.load_teacher = lambda teacher, args: teacher
    distill_gpt.balance_steps()
    return distill_gpt.forward_step, add_modelopt_args
