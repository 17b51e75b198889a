"""A run without --save whose loss is NaN ends with a TypeError that does not name it.

Upstream's train() gets what a step returns whose loss is NaN, and so when it was run again. What
else it needs is stood for. Ends with exit code 1 if it saves to no folder. It needs no GPU.
"""

import sys
from unittest.mock import MagicMock

from megatron.training import checkpointing, global_vars, training


class Arguments:
    """Flags of which none is given, --save included."""

    iteration, train_iters, consumed_train_samples, save = 7, 8, 0, None
    ckpt_format, iterations_to_skip, profile_ranks = "torch_dist", [], []

    def __getattr__(self, name):
        return None


def diverged(*args, **kwargs):
    """Return what train_step does then: no loss; save a checkpoint; end with exit code 16."""
    return {}, True, True, True, 16, None, None, 0


def save_checkpoint(iteration, *args, **kwargs):
    """Name the checkpoint's folder, which upstream's save_checkpoint does before all else."""
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
