"""Keep the states of custom quantizers in checkpoints, and end their steps."""

import json
from argparse import Namespace

import torch

from mqo.megatron.run.saved_args import STATES
from mqo.megatron.run.unpickle import CheckpointError
from mqo.quant.config import current
from mqo.quant.quantization import PROCESS

_args: Namespace | None = None


def begin_step(args: Namespace) -> None:
    """Prepare a step: notes of a validation before it do not count."""
    global _args
    PROCESS.states.begin_step()
    if _args is not args:  # later steps end with their states in it
        _args = args
        _store()


def end_step(iteration: int) -> None:
    """Compute the next states, and put them where checkpoints contain them. A collective."""
    if PROCESS.end_states(iteration):
        _store()


def load_states(saved: Namespace, is_fixed: bool = False) -> None:
    """Take the states from the arguments in a checkpoint; with `is_fixed` they stay as they are.

    Raises:
        CheckpointError: they are damaged, or do not fit the quantizers here.
    """
    current()  # it runs the files of the quantizers
    PROCESS.states.is_fixed = is_fixed
    try:
        values = {
            name: torch.tensor(json.loads(text), dtype=torch.float32)
            for name, text in getattr(saved, STATES, {}).items()
        }
        PROCESS.states.load_state_dict(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the checkpoint has states of quantizers that cannot be used: {error}. Expected: "
            "those of the run's quantizers. Give another CHECKPOINT, or the --plugin of its run"
        ) from error


def _store() -> None:
    # Upstream saves its arguments with each checkpoint, for any layout.
    if states := PROCESS.states.state_dict():
        texts = {name: json.dumps(value.tolist()) for name, value in states.items()}
        setattr(_args, STATES, texts)
