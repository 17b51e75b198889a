"""A run without --save whose loss is NaN ends with a TypeError that does not mention the loss.

Upstream's train() gets the result of a step whose loss is NaN, also when the step is repeated.
Mocks replace everything else. Exits with 1 if it saves to the folder None. It needs no GPU.
"""

import sys
from unittest.mock import MagicMock

from megatron.training import checkpointing, global_vars, training


class Arguments:
    """Parsed flags, with --save and all others unset."""

    iteration, train_iters, consumed_train_samples, save = 7, 8, 0, None
    ckpt_format, iterations_to_skip, profile_ranks = "torch_dist", [], []

    def __getattr__(self, name):
        return None


def diverged(*args, **kwargs):
    """Return the result of train_step for a NaN loss: save a checkpoint, and exit with code 16."""
    return {}, True, True, True, 16, None, None, 0


def save_checkpoint(iteration, *args, **kwargs):
    """Compute the name of the checkpoint folder, the first step of upstream's save_checkpoint."""
    folder = global_vars.get_args().save
    print(f"a checkpoint of iteration {iteration} is saved to {folder}")
    checkpointing.get_checkpoint_name(folder, iteration, return_base_dir=True)


machine = MagicMock(current_iteration=Arguments.iteration)
for name in ("get_attr_wrapped_model", "get_forward_backward_func", "get_num_microbatches"):
    setattr(training, name, MagicMock())
for name in ("print_datetime", "report_memory", "update_num_microbatches", "print_rank_0"):
    setattr(training, name, MagicMock())
training.get_rerun_state_machine = lambda: machine
training.train_step, training.save_checkpoint = diverged, save_checkpoint
global_vars._GLOBAL_ARGS = Arguments()
global_vars._GLOBAL_TIMERS = global_vars._GLOBAL_ENERGY_MONITOR = MagicMock()
try:
    training.train(None, [MagicMock()], *(MagicMock() for _ in range(8)))
except SystemExit as ended:
    print(f"exit code {ended.code}")
except TypeError as error:
    sys.exit(f"TypeError: {error}")
