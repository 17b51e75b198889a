"""Build and load a model on one process, for programs that do not train."""

import io
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import copy
from pathlib import Path

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.rerun_state_machine import initialize_rerun_state_machine
from megatron.training import global_vars
from megatron.training.checkpointing import load_checkpoint
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory
from mqo.megatron.run.errors import InferenceError, SavedError
from mqo.megatron.run.guard import GuardError
from mqo.megatron.run.isolated import machine_memory
from mqo.megatron.run.ranks import with_group
from mqo.megatron.run.start import quicken_sources
from mqo.megatron.run.unpickle import CheckpointError, typed_errors
from torch import nn

from .gpt import releases
from .gpt.model_provider import model_provider

_TYPED = (InferenceError, CheckpointError, GuardError)
_TRAINING_BYTES = 18  # upstream's count per parameter
_GIB = 1 << 30

quicken_sources()  # before the programs make upstream's parser


def build(args: Namespace) -> nn.Module:
    """Build the model of upstream's arguments, without wrappers; `args` become the global ones.

    Its weights are random. If the checkpoint in `args` has ModelOpt's state, that is restored.

    Raises:
        SavedError: the weights do not fit into the memory of this machine.
    """
    check_memory(args)
    global_vars.set_global_variables(args, build_tokenizer=False)
    with_group()
    mpu.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    initialize_rerun_state_machine()
    return releases.bare_model(args, model_provider)


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Load all weights from `folder`, which the global arguments name.

    Raises:
        CheckpointError, SavedError: the weights cannot be read, are incomplete, or do not fit.
    """
    try:
        with typed_errors():
            load_checkpoint([model], None, None, strict=True)
    except CheckpointError:
        raise
    except Exception as error:  # readers of files raise errors of any type
        raise SavedError(f"{folder} cannot be loaded: {error}", "a complete checkpoint") from error


@contextmanager
def typed_build_errors(subject: str) -> Iterator[None]:
    """Turn errors of upstream's code into SavedError about `subject`.

    Upstream checks combinations of arguments with assertions, and some not at all.
    """
    try:
        yield
    except _TYPED:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())
        raise SavedError(
            f"{subject} do not describe a model that Megatron can build: {why}",
            "compatible arguments",
            "Use another checkpoint",
        ) from error


def check_memory(args: Namespace) -> None:
    """Raise SavedError if the weights of the model need more memory than this machine has."""
    needed, available = weight_bytes(args), machine_bytes()
    if needed > available:
        raise SavedError(
            f"The weights of this model need {needed / _GIB:,.1f} GiB, but this machine has "
            f"{available / _GIB:,.1f} GiB of memory",
            "a model that fits",
        )


def weight_bytes(args: Namespace) -> float:
    """Return the size of the weights in bytes, from upstream's count of parameters."""
    sizes = copy(args)
    sizes.padded_vocab_size = sizes.padded_vocab_size or sizes.vocab_size
    sizes.use_distributed_optimizer = False
    # For latent attention, upstream's model ignores this flag, but its count refuses it.
    sizes.group_query_attention = args.group_query_attention and not args.multi_latent_attention
    with redirect_stdout(io.StringIO()):
        parameters = compute_weight_and_optimizer_memory(sizes) / _TRAINING_BYTES
    return parameters * args.params_dtype.itemsize


def machine_bytes() -> int:
    """Return the memory of the GPU in bytes, or without one that of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return machine_memory()
