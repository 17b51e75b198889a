"""Load a saved model as it was trained, on one process, for evaluate.py and generate.py."""

import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.spec_utils import import_module
from megatron.training import arguments
from mqo.megatron.device import accelerator_type
from mqo.megatron.run import checkpoints, guard, resumed_types
from mqo.megatron.run.errors import SavedError, building_tokenizer, reading
from mqo.megatron.run.files import RELEASE, TRACKER, iteration_of
from mqo.megatron.run.foreign_tokenizer import check_tokenizer
from mqo.megatron.run.plugin_states import load_states
from mqo.megatron.run.saved_args import check_kinds, model_arguments
from mqo.megatron.run.unpickle import FORMAT_FILE, check_metadata
from mqo.quant.schedule import parse_schedule, type_at
from torch import Tensor, nn

from .checkpointing import WEIGHTS_ONLY, check_format, checkpoint_folder
from .one_process import build, load_weights, typed_build_errors

T = TypeVar("T")
# Flags of a program that reads weights and does not train.
READING = ["--train-iters=1", "--lr=0"]


def find_checkpoint(path: Path) -> Path:
    """Return the folder of an iteration: `path` itself, or the newest checkpoint in it.

    Raises:
        SavedError: the checkpoint is missing, or its files have changed since they were written.
    """
    checkpoint = path if (path / FORMAT_FILE).is_file() else checkpoint_folder(path)
    if checkpoint is None:
        raise SavedError(
            f"{path} has no checkpoint",
            f"a run's folder, a folder with {TRACKER}, or that of an iteration",
        )
    check_format(checkpoint)
    whole = (checkpoint / checkpoints.MANIFEST).is_file()
    if why := (checkpoints.fault(checkpoint) if whole else None):
        raise SavedError(f"The checkpoint {checkpoint} is damaged: {why}", "files as written")
    check_metadata(checkpoint)
    return checkpoint


def types_of(saved: Namespace, folder: Path) -> dict[str, str]:
    """Return {site: type} of the last step before a folder was written; {} if not recorded.

    A type may be unknown here, such as a custom quantizer.

    Raises:
        CheckpointError: the record has another kind.
        SavedError: the record is not a schedule of types.
    """
    check_kinds(vars(saved), folder)
    step = max(0, (iteration_of(folder) or 0) - 1)
    types = getattr(saved, resumed_types.TYPES, {})
    total = getattr(saved, "train_iters", None)
    try:
        schedules = {site: parse_schedule(text, any_type=True) for site, text in types.items()}
        return {site: type_at(phases, step, total) for site, phases in schedules.items()}
    except ValueError as error:
        raise SavedError(
            f"{folder} records no types: {error}", "a schedule of types for each site"
        ) from error


def arguments_here(
    folder: Path, saved: Namespace, platform: list[str], ignored: Collection[str] = ()
) -> Namespace:
    """Return upstream's arguments for the saved model, in one process on this machine.

    The checkpoint's arguments describe the model. All others come from `platform`, the flags for
    this machine, and from the parser's defaults. Unknown arguments in `ignored` are skipped.

    Raises:
        CheckpointError: an argument of the checkpoint is refused.
        SavedError: upstream refuses the combination of the arguments.
    """
    model = model_arguments(vars(saved), folder, ignored)
    before, sys.argv = sys.argv, [sys.argv[0], *platform, *READING]
    args = arguments.parse_args()
    sys.argv = before
    source = {"load": str(folder.parent), "ckpt_step": iteration_of(folder)}
    vars(args).update(model | WEIGHTS_ONLY | source)
    with typed_build_errors(f"The arguments in {folder}"):
        arguments.validate_args(args)
        # Upstream silently uses other layers if it cannot import these.
        if args.spec is not None and import_module(args.spec) is None:
            raise ImportError(f"{'.'.join(args.spec)} does not exist")
    args.curr_iteration = 0
    return args


def load(
    folder: Path, saved: Namespace, platform: list[str], ignored: Collection[str] = ()
) -> tuple[Namespace, nn.Module]:
    """Load the model in an iteration's folder, and upstream's arguments for one process here.

    The parameters are those of `arguments_here`. If the checkpoint has ModelOpt's state, it is
    restored: its quantizers are part of the model.

    Raises:
        CheckpointError, SavedError: as `arguments_here`; upstream would not find the folder; the
            model does not fit into memory; the weights do not match the arguments, or cannot be
            read.
    """
    if iteration_of(folder) is None and folder.name != RELEASE:
        raise SavedError(
            f"The folder {folder} has the files of an iteration, and upstream reads none of this "
            "name",
            f"the name iter_0000160, for iteration 160, or {RELEASE}",
        )
    args = arguments_here(folder, saved, platform, ignored)
    with typed_build_errors(f"The arguments in {folder}"):
        model = build(args)
    load_weights(model, folder)
    load_states(saved, is_fixed=True)
    return args, model.eval()


@contextmanager
def watched_step(model: Any, args: Namespace) -> Iterator[None]:
    """Let the guard compare the first forward pass with the types in quant.toml.

    Raises:
        GuardError: a site does not run with its type.
    """
    first = not getattr(model, "mqo_watched", False)
    if first:
        guard.before_step([model], args)
    yield
    if first:
        guard.after_step(args.curr_iteration + 1)
        model.mqo_watched = True


def batches(rows: Iterable[T], size: int, length: Callable[[Any], int] = len) -> Iterator[list[T]]:
    """Yield batches of up to `size` neighbors of equal length."""
    for _, alike in groupby(rows, length):
        while batch := list(islice(alike, size)):
            yield batch


def token_losses(model: Any, batch: list[list[int]]) -> Tensor:
    """Return the losses of all tokens but a row's first, in nats: float32 [rows, length - 1]."""
    ids = torch.tensor(batch, device=accelerator_type())
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(tokens.size(1), device=ids.device).expand_as(tokens)
    losses: Tensor = model(tokens, positions, None, labels=labels).float()
    return losses


def tokenizer_of(args: Namespace, given: Path | None = None) -> Any:
    """Build the tokenizer of the training, or the one in `given`, with upstream's code.

    Raises:
        SavedError: the tokenizer is missing, or has tokens that the model does not know.
    """
    wanted = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(given)}
    chosen = Namespace(**vars(args) | (wanted if given else {}))
    where = chosen.tokenizer_model or chosen.vocab_file or chosen.tokenizer_type
    help = "Pass one with --tokenizer"
    if chosen.tokenizer_type is None or (chosen.tokenizer_model and not Path(where).exists()):
        raise SavedError(f"The tokenizer {where} is missing", "that of the training", help)
    if Path(where).exists():
        with reading():
            check_tokenizer(Path(where))
    with building_tokenizer(where, help=help):
        tokenizer = build_tokenizer(chosen)
    check_vocabulary(args, tokenizer.vocab_size - 1, f"The tokenizer at {where}")
    return tokenizer


def check_vocabulary(args: Namespace, largest: int, holder: str) -> None:
    """Raise SavedError if the model has no row for the token id `largest` of `holder`."""
    rows = args.padded_vocab_size or args.vocab_size  # the first exists only in trainings
    if largest >= rows:
        raise SavedError(
            f"{holder} has the token {largest}, but the model's last token is {rows - 1}",
            "the vocabulary that the model was trained with",
        )
