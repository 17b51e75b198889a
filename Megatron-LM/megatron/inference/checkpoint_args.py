"""Read the arguments in a checkpoint, for any program."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from mqo.megatron.run.errors import SavedError, reading
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
