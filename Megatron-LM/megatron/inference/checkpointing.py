"""Read checkpoints: arguments, ModelOpt's state, and the weights of a distillation's teacher."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mqo.megatron.hooks
from megatron.core import dist_checkpointing
from megatron.training.checkpointing import load_checkpoint
from mqo.megatron.run import modelopt
from mqo.megatron.run.checkpoints import loaded
from mqo.megatron.run.errors import SavedError, reading
from mqo.megatron.run.files import TRACKER
from mqo.megatron.run.ranks import with_group
from mqo.megatron.run.saved_args import with_names_of_this_release
from mqo.megatron.run.unpickle import (
    FORMAT_FILE,
    CheckpointError,
    check_common_state,
    check_metadata,
    typed_errors,
)
from mqo.megatron.run.untrusted import Limit, check_file
from torch import nn

from .arguments import TEACHER_ARG

NEMO_WEIGHTS = "model_weights"
# Transformer Engine's norms are part of the next layer: {theirs: ours}, within a layer.
FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
WRAPPER = "module."
# Upstream's arguments to read only the weights of a checkpoint.
WEIGHTS_ONLY: dict[str, bool | None]
WEIGHTS_ONLY = {"finetune": True, "no_load_optim": True, "no_load_rng": True}
WEIGHTS_ONLY |= {"pretrained_checkpoint": None, "exit_on_missing_checkpoint": True}


def check_format(folder: Path) -> None:
    """Raise SavedError unless torch_dist wrote an iteration's folder."""
    with reading():
        check_file(folder / FORMAT_FILE, Limit.RECORD)
    try:
        known = dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    except Exception as error:  # a damaged metadata.json can raise anything
        raise SavedError(
            f"{folder / FORMAT_FILE} cannot be read: {error}", "a complete checkpoint"
        ) from error
    if not known:
        raise SavedError(f"{folder} is not a checkpoint", "a folder that torch_dist wrote")


def common_state(folder: Path) -> dict[str, Any]:
    """Return the entries of an iteration's folder that are not tensors.

    Raises:
        CheckpointError: the checkpoint would run code.
        SavedError: the checkpoint cannot be read.
    """
    with_group()
    check_metadata(folder)
    check_common_state(folder)
    try:
        with typed_errors():
            return dist_checkpointing.load_common_state_dict(str(folder))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise SavedError(f"{folder} cannot be read: {error}", "a complete checkpoint") from error


def read_args(folder: Path) -> Namespace:
    """Return the arguments in an iteration's folder; raise what `common_state` raises.

    Names of older releases are translated. Also raise SavedError if it has no arguments.
    """
    state = common_state(folder)
    if not isinstance(state.get("args"), Namespace):
        raise SavedError(f"{folder} does not describe its model", "a checkpoint of a training")
    args = Namespace()
    vars(args).update(with_names_of_this_release(vars(state["args"])))
    return args


def checkpoint_folder(load_dir: str | Path) -> Path | None:
    """Return the folder of the newest checkpoint in `load_dir`, or NeMo's; None without one."""
    folder = Path(load_dir)
    checkpoint = loaded(folder) if (folder / TRACKER).is_file() else folder / NEMO_WEIGHTS
    return checkpoint if checkpoint.is_dir() else None


def load_modelopt_state(load_dir: str | Path) -> dict[str, Any]:
    """Read ModelOpt's state in the newest checkpoint's folder; {} if there is none."""
    checkpoint = checkpoint_folder(load_dir)
    if checkpoint is None or not (checkpoint / modelopt.STATE).is_dir():
        return {}
    return common_state(checkpoint / modelopt.STATE)


def read_arguments(load_dir: str | Path) -> dict[str, Any]:
    """Read the arguments in the newest checkpoint; {} if it has none."""
    checkpoint = checkpoint_folder(load_dir)
    if checkpoint is None or not (checkpoint / FORMAT_FILE).is_file():
        return {}
    args = common_state(checkpoint).get("args", Namespace())
    return with_names_of_this_release(vars(args))


def load_teacher(teacher: nn.Module, args: Namespace) -> nn.Module:
    """Load the weights of its newest checkpoint, of any layout, into `teacher`.

    `args` are upstream's global arguments; they name the folder, and are restored afterwards.
    """
    accept_other_names(teacher)
    with _as_for_finetuning(args), typed_errors():
        load_checkpoint([teacher], None, None, load_arg=TEACHER_ARG)
    # The quant types of the teacher do not apply to the student.
    mqo.megatron.hooks.note_checkpoint(Namespace())
    return teacher


def accept_other_names(model: nn.Module) -> None:
    """Let `model` load weights with a wrapper's names, or with Transformer Engine's.

    A weight is renamed only if the model has no weight of that name. Names in sharded checkpoints
    fit any model; those in checkpoints with one file per rank do not.
    """
    own = set(model.state_dict())

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        del module, rest
        for name in [name for name in state if name.startswith(prefix)]:
            new = _own_name(name[len(prefix) :])
            if new in own and name[len(prefix) :] not in own:
                state[prefix + new] = state.pop(name)

    model.register_load_state_dict_pre_hook(rename)


def _own_name(name: str) -> str:
    while name.startswith(WRAPPER):
        name = name.removeprefix(WRAPPER)
    for theirs, ours in FUSED_NORMS.items():
        name = name.replace(theirs, ours)
    return name


@contextmanager
def _as_for_finetuning(args: Namespace) -> Iterator[None]:
    """In this block, load only weights from the given folder, without resuming its run."""
    before = dict(vars(args))
    vars(args).update(WEIGHTS_ONLY, ckpt_step=None)
    try:
        yield
    finally:
        vars(args).clear()
        vars(args).update(before)
