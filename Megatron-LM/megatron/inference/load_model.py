"""A saved model as it was trained, on one process: what evaluate.py and generate.py run."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.quant.schedule import parse_schedule, type_at
from megatron.run import checkpoints, guard, resumed_types
from megatron.run.foreign_tokenizer import check_tokenizer
from megatron.run.unpickle import check_metadata, check_spec, typed_errors
from megatron.training import arguments
from megatron.training.checkpointing import load_checkpoint
from torch import nn

from .checkpoint_args import check_format, read_args  # noqa: F401  (read_args is for programs)
from .checkpointing import TRACKER, WEIGHTS_ALONE, checkpoint_folder
from .errors import InferenceError, SavedError, leave, reading
from .one_process import build

Row = TypeVar("Row")
ITERATION = "iter_"
# Of one process, whatever the checkpoint was split into.
ALONE = {f"{kind}_model_parallel_size": 1 for kind in ("tensor", "pipeline", "expert")}
ALONE |= {"expert_tensor_parallel_size": 1, "context_parallel_size": 1, "data_parallel_size": 1}
ALONE |= {"virtual_pipeline_model_parallel_size": None, "sequence_parallel": False}
ALONE |= {"pipeline_model_parallel_layout": None, "tp_comm_overlap": False}
# Not a training: nothing is saved, logged or recomputed, and only weights are read.
READING = {**WEIGHTS_ALONE, "save": None, "tensorboard_dir": None, "wandb_project": ""}
READING |= {"use_distributed_optimizer": False, "recompute_granularity": None}
READING |= {"rampup_batch_size": None, "verify_integrity": False, "curr_iteration": 0}
READING |= {"use_checkpoint_args": False}
# A checkpoint does not decide that code of its tokenizer runs.
READING |= {"trust_remote_code": False}
# What depends on the machine, and not on the model.
PLATFORM = ("transformer_impl", "persist_layer_norm", "gradient_accumulation_fusion")
PLATFORM += ("masked_softmax_fusion", "apply_rope_fusion", "bias_swiglu_fusion")
PLATFORM += ("no_persist_layer_norm", "bias_dropout_fusion", "num_workers")
PLATFORM += ("use_cpu_initialization",)
PLATFORM += ("distributed_backend", "rank", "world_size", "local_rank", "ckpt_format")


def write_result_or_exit(work: Callable[[], dict[str, Any]], target: Path) -> None:
    """Write what `work` gives as JSON to `target`, or leave with its error.

    A user-correctable error is written to the file that MQO_FAILURE names.
    """
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    try:
        facts = work()
    except (InferenceError, checkpoints.CheckpointError, guard.GuardError) as error:
        leave(error)
    target.write_text(json.dumps(facts), encoding="utf-8")


def find_checkpoint(path: Path) -> Path:
    """Find the folder of one iteration that `path` means: itself, or the newest in it.

    Raises:
        SavedError: there is none; its files are not as they were written.
    """
    found = path if (path / "metadata.json").is_file() else checkpoint_folder(path)
    if found is None:
        raise SavedError(
            f"There is no checkpoint in {path}",
            f"a run's folder, a folder with {TRACKER}, or that of an iteration",
        )
    check_format(found)
    whole = (found / checkpoints.MANIFEST).is_file()
    if why := (checkpoints.fault(found) if whole else None):
        raise SavedError(f"The checkpoint {found} is damaged: {why}", "files as they were written")
    check_metadata(found)
    return found


def types_of(saved: Namespace, folder: Path) -> dict[str, str]:
    """Return {site: type} of the step before a folder was written; {} where it does not say."""
    step = max(0, (iteration(folder) or 0) - 1)
    types = getattr(saved, resumed_types.TYPES, {})
    return {
        site: type_at(parse_schedule(text), step, saved.train_iters) for site, text in types.items()
    }


def iteration(folder: Path) -> int | None:
    """Return the iteration that a folder is called after; None of another name, "release" say."""
    number = folder.name.removeprefix(ITERATION)
    return int(number) if number.isdecimal() else None


def arguments_here(folder: Path, saved: Namespace, platform: list[str]) -> Namespace:
    """Return the saved arguments, on this machine; those that its release lacked, as parsed.

    Raises:
        CheckpointError: they name a module of somebody else's, which would be imported.
    """
    check_spec(saved, folder)
    before, sys.argv = sys.argv, [sys.argv[0], *platform]
    fresh = vars(arguments.parse_args())
    sys.argv = before
    here: Mapping[str, Any] = {name: fresh[name] for name in PLATFORM if name in fresh}
    place = {"load": str(folder.parent), "ckpt_step": iteration(folder)}
    args = Namespace(**fresh | vars(saved) | here | ALONE | READING | place)
    args.global_batch_size = args.micro_batch_size
    return args


def load(folder: Path, saved: Namespace, platform: list[str]) -> tuple[Namespace, nn.Module]:
    """Load the model in an iteration's folder, and upstream's arguments for one process here.

    `saved` are those of the checkpoint, `platform` the flags that say what the machine has.
    ModelOpt's state is restored where the checkpoint has one: its quantizers are part of the model.

    Raises:
        SavedError: the weights are not those that the arguments describe, or cannot be read.
    """
    args = arguments_here(folder, saved, platform)
    model = build(args)
    try:
        with typed_errors():
            load_checkpoint([model], None, None, strict=True)
    except checkpoints.CheckpointError:
        raise
    except Exception as error:  # whatever a file's reader raises
        raise SavedError(f"{folder} cannot be loaded: {error}", "a whole checkpoint") from error
    return args, model.eval()


@contextmanager
def watched_step(model: nn.Module, args: Namespace) -> Iterator[None]:
    """Have the guard hold the first forward pass to the types that quant.toml asks for.

    Raises:
        GuardError: a site does not run as asked.
    """
    first = not getattr(model, "mqo_watched", False)
    if first:
        guard.before_step([model], args)
    yield
    if first:
        guard.after_step(args.curr_iteration + 1)
        model.mqo_watched = True


def batches(
    rows: Iterable[Row], size: int, length: Callable[[Row], int] = len
) -> Iterator[list[Row]]:
    """Yield up to `size` neighbors of one length."""
    for _, alike in groupby(rows, length):
        while batch := list(islice(alike, size)):
            yield batch


def tokenizer_of(args: Namespace, given: Path | None = None) -> Any:
    """Build the tokenizer of the training, or the one `given`, as upstream does.

    Raises:
        SavedError: there is none, or it has tokens that the model does not know.
    """
    wanted = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(given)}
    chosen = Namespace(**vars(args) | (wanted if given else {}))
    where = chosen.tokenizer_model or chosen.vocab_file or chosen.tokenizer_type
    help = "Name one with --tokenizer"
    if chosen.tokenizer_type is None or (chosen.tokenizer_model and not Path(where).exists()):
        raise SavedError(f"There is no tokenizer at {where}", "that of the training", help)
    if Path(where).exists():
        with reading():
            check_tokenizer(Path(where))
    try:
        made = build_tokenizer(chosen)
    except Exception as error:  # each library has its own
        raise SavedError(
            f"{where} is no tokenizer: {error}", "a tokenizer's folder", help
        ) from error
    check_vocabulary(args, made.vocab_size - 1, f"The tokenizer at {where}")
    return made


def check_vocabulary(args: Namespace, largest: int, what: str) -> None:
    """Raise SavedError if `what` holds the token id `largest` and the model has no row for it."""
    rows = args.padded_vocab_size or args.vocab_size  # the first is that of a training alone
    if largest >= rows:
        raise SavedError(
            f"{what} has the token {largest}, and the model ends at {rows - 1}",
            "the vocabulary that the model was trained with",
        )
