"""Find the program for a run's flags: pretrain_gpt.py, or distill_gpt.py with a teacher."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TEACHER = "--export-kd-teacher-load"


class Program(NamedTuple):
    """The functions of a program: model configuration, forward step, and further flags."""

    configure: Callable[[Namespace], Any]
    forward_step: Callable[..., tuple]
    extra_args: Callable | None = None


def program(flags: Sequence[str]) -> Program:
    """Return the program for the flags."""
    if not any(word.partition("=")[0] == TEACHER for word in flags):
        import pretrain_gpt

        return Program(lambda args: pretrain_gpt.model_config(), pretrain_gpt.forward_step)
    import distill_gpt
    from megatron.inference.arguments import add_modelopt_args
    from megatron.inference.gpt import model_provider

    # Only a teacher's sizes are needed, so a folder that names them is enough.
    model_provider.checkpoint_folder = Path
    model_provider.load_teacher = lambda teacher, args: teacher
    return Program(distill_gpt.model_config, distill_gpt.forward_step, add_modelopt_args)
