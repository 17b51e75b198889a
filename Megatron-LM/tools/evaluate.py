"""Compute the loss of a checkpoint on a text, or its scores in tasks, for `mqo eval`.

`mqo sensitivity` uses it, too. The model is built from the arguments in the checkpoint, and runs
the source of this tree with its quant types.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import preflight  # noqa: F401  (checks where megatron comes from)
import torch
from megatron.inference import load_model
from megatron.inference.checkpointing import common_state, read_args
from mqo.megatron.run.errors import reading
from mqo.megatron.run.files import iteration_of
from mqo.megatron.run.modelopt import QUANTIZED_AS, STATE, describe_state
from mqo.megatron.run.progress import advance
from mqo.megatron.run.untrusted import Limit, read_text

VALIDATION = 1  # of upstream's three splits


class Choice(NamedTuple):
    """The texts to read: indexed datasets, a file, or else the training's validation split.

    `tokenizer` is that of the file, by default the training's; `tokens` is the largest number of
    tokens to predict.
    """

    data: tuple[str, ...] = ()
    text: Path | None = None
    tokenizer: Path | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Text:
    """The documents of a text, each an array of token ids, with a name to print.

    `size` is the number of their tokens.
    """

    name: str
    documents: Iterable[Any]
    size: int = 0

    def predicted(self, limit: int | None) -> int:
        """Return the number of tokens to predict: all but the first, at most `limit`."""
        return min(self.size - 1, limit or self.size)


def describe(checkpoint: Path) -> dict[str, Any]:
    """Return the folder of the newest iteration, and the {site: quant type} of its last step.

    `rows` says whether a recipe had rows for operands or layers, which are in the run's options.
    `formats` has the digests of the user's formats, `plugins` the versions and options of custom
    quantizers, and `modelopt` describes what ModelOpt's state quantizes, if the checkpoint has one.
    `checkpoint` is a folder of checkpoints, or of one iteration.
    """
    from mqo.megatron.run.resumed_types import FORMATS, PLUGINS, ROWS

    folder = load_model.find_checkpoint(checkpoint)
    args = read_args(folder)
    types = load_model.types_of(args, folder)
    state = common_state(folder / STATE) if (folder / STATE).is_dir() else {}
    modelopt = describe_state(state, getattr(args, QUANTIZED_AS, None))
    return {
        "folder": str(folder),
        "types": types,
        "rows": bool(getattr(args, ROWS, None)),
        "formats": getattr(args, FORMATS, {}),
        "plugins": getattr(args, PLUGINS, {}),
        "modelopt": modelopt,
    }


def run(
    checkpoint: Path, platform: list[str], choice: Choice, ignored: list[str]
) -> dict[str, Any]:
    """Measure the mean loss in nats per token; return it with the texts and token counts.

    `platform` are Megatron's flags for this machine, and `ignored` unknown arguments of the
    checkpoint to ignore.
    """
    folder, args, model, texts, limit = loaded_with_texts(checkpoint, platform, choice, ignored)
    started = time.monotonic()
    total, done = sum(text.predicted(limit) for text in texts), 0
    sums = []
    for text in texts:
        told = partial(lambda before, more: advance("tokens", before + more, total), done)
        sums.append(measured(model, args, text, limit, told))
        done += sums[-1][1]
    loss, tokens = (sum(column) for column in zip(*sums, strict=True))
    return {
        "loss": loss / tokens,
        "tokens": tokens,
        "text": [text.name for text in texts],
        "seconds": time.monotonic() - started,
        **described(args, folder),
    }


def tasks(
    checkpoint: Path,
    platform: list[str],
    names: list[str],
    choice: Choice,
    folder: Path | None,
    limit: int | None,
    shots: int | None,
    ignored: list[str],
) -> dict[str, Any]:
    """Score a model in the tasks, which are built before its weights are read.

    Args:
        checkpoint, platform, ignored: as in `run`.
        names: of tasks of lm-evaluation-harness.
        choice: the texts of the task that reads them, and the tokenizer.
        folder: one with YAML of more tasks.
        limit: the largest number of documents per task.
        shots: the number of examples before each question.
    """
    from megatron.inference.tasks import registry
    from megatron.inference.tasks.model import HarnessModel
    from megatron.inference.tasks.scores import evaluate

    iteration = load_model.find_checkpoint(checkpoint)
    saved = read_args(iteration)
    args = load_model.arguments_here(iteration, saved, platform, ignored)
    tokenizer = load_model.tokenizer_of(args, choice.tokenizer)
    if tokenizer.eod is None:
        raise load_model.SavedError(
            "The tokenizer has no end-of-document token", "a token to begin a text with"
        )
    texts = partial(documents, args, choice, limit, tokenizer)
    loaded = registry.load(names, folder, texts)
    registry.check(loaded["tasks"].values(), args.seq_length)
    started = time.monotonic()
    args, model = load_model.load(iteration, saved, platform, ignored)
    wrapped = HarnessModel(model, args, tokenizer, advance)
    return {
        "scores": evaluate(wrapped, loaded, limit, shots),
        "seconds": time.monotonic() - started,
        **described(args, iteration),
    }


def sensitivity(
    checkpoint: Path, platform: list[str], by: str, choice: Choice, ignored: list[str]
) -> dict[str, Any]:
    """Measure how the loss and the gradient change with one subset of kind `by` quantized.

    The other parameters are those of `run`.
    """
    from megatron.inference import sensitivity

    folder, args, model, texts, limit = loaded_with_texts(checkpoint, platform, choice, ignored)
    started = time.monotonic()
    batches = [batch for text in texts for batch in batches_of(args, text, limit)]
    measured = sensitivity.measure(model, args, batches, by, partial(advance, "subsets"))
    return {
        "text": [text.name for text in texts],
        "seconds": time.monotonic() - started,
        **measured,
        **described(args, folder),
    }


def loaded_with_texts(
    checkpoint: Path, platform: list[str], choice: Choice, ignored: list[str]
) -> tuple[Path, Namespace, Any, list[Text], int | None]:
    """Return the checkpoint's folder, its arguments and model, and the texts to measure.

    The last element is the largest number of tokens to predict of each text, None for all.
    """
    folder = load_model.find_checkpoint(checkpoint)
    args, model = load_model.load(folder, read_args(folder), platform, ignored)
    texts = chosen_texts(args, choice)
    limit = choice.tokens and max(1, choice.tokens // len(texts))
    return folder, args, model, texts, limit


def described(args: Namespace, folder: Path) -> dict[str, Any]:
    """Return the facts that both results share: window, iteration, dtype and ModelOpt's format."""
    return {
        "window": args.seq_length,
        "iteration": iteration_of(folder),
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "modelopt": getattr(args, QUANTIZED_AS, None),
    }


def documents(args: Namespace, choice: Choice, limit: int | None, tokenizer: Any) -> Iterator[str]:
    """Yield up to `limit` documents of the chosen texts, detokenized.

    Raises:
        SavedError: a text is missing, or has token ids outside of the vocabulary.
    """
    each = ((text.name, ids) for text in chosen_texts(args, choice) for ids in text.documents)
    for name, document in islice(each, limit):
        ids = [int(token) for token in document]
        load_model.check_vocabulary(args, max(ids, default=0), name)
        yield tokenizer.detokenize([token for token in ids if token != tokenizer.eod])


def chosen_texts(args: Namespace, choice: Choice) -> list[Text]:
    """Return the texts to read.

    Raises:
        SavedError: a file is missing, or there is no validation split or suitable tokenizer.
    """
    if choice.text:
        tokenizer = load_model.tokenizer_of(args, choice.tokenizer)
        with reading():
            text = read_text(choice.text, Limit.TEXT)
        ids = tokenizer.tokenize(text)
        return [Text(choice.text.name, [ids], len(ids))]
    if choice.data:
        return [indexed_text(prefix, (0, 1), Path(prefix).name) for prefix in choice.data]
    prefixes, share = held_out(args)
    return [indexed_text(p, share, f"{Path(p).name}, validation split") for p in prefixes]


def held_out(args: Namespace) -> tuple[list[str], tuple[float, float]]:
    """Return the prefixes of the validation data, and which share of their documents it is.

    Raises:
        SavedError: the training had no validation split.
    """
    from megatron.core.datasets import blended_megatron_dataset_config as splits
    from megatron.training.utils.common_utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    share = (0.0, 1.0)
    if per_split:
        blend = per_split[VALIDATION]
    elif blend:
        vector = splits.parse_and_normalize_split(args.split)
        share = splits.convert_split_vector_to_split_matrix(vector)[VALIDATION]
    if not blend or share is None:
        raise load_model.SavedError(
            "The training had no validation split",
            "text that the model was not trained on",
            "Pass it with --data or --text",
        )
    return blend[0], share


def indexed_text(prefix: str, share: tuple[float, float], name: str) -> Text:
    """Return a share of the documents of an index, in order; upstream rounds its bounds the same.

    Raises:
        SavedError: a file of the index is missing.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    missing = [p for p in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")) if not p.is_file()]
    if missing:
        raise load_model.SavedError(
            f"{missing[0]} does not exist", "an indexed dataset", "Pass another one with --data"
        )
    index = IndexedDataset(prefix)
    first, last = (round(bound * len(index)) for bound in share)
    size = int(index.sequence_lengths[first:last].sum())
    return Text(name, (index[n] for n in range(first, last)), size)


def measured(
    model: Any,
    args: Namespace,
    text: Text,
    limit: int | None,
    told: Callable[[int], None] = lambda tokens: None,
) -> tuple[float, int]:
    """Return the sum of a text's token losses in nats, and the number of predicted tokens.

    `told` is called with that number after each batch.

    Raises:
        SavedError: the text is shorter than a window, or has ids outside of the vocabulary.
    """
    total, tokens = 0.0, 0
    for batch in batches_of(args, text, limit):
        with load_model.watched_step(model, args), torch.no_grad():
            losses = load_model.token_losses(model, batch)
        total += losses.double().sum().item()
        tokens += losses.numel()
        told(tokens)
    return total, tokens


def batches_of(args: Namespace, text: Text, limit: int | None) -> Iterator[list[list[int]]]:
    """Yield batches of windows of a text, with `limit` predicted tokens at most.

    Raises:
        SavedError: the text is shorter than a window, or has ids outside of the vocabulary.
    """
    tokens, rows = 0, windows(ids_of(args, text, limit), args.seq_length)
    for batch in load_model.batches(rows, args.micro_batch_size):
        tokens += sum(len(window) - 1 for window in batch)
        yield batch
    wanted = min(limit or args.seq_length, args.seq_length)
    if tokens < wanted:
        raise load_model.SavedError(
            f"{text.name} holds {tokens + (tokens > 0)} tokens",
            f"at least {wanted + 1}, one window and the token after it",
            "Use a longer text, or a smaller --tokens",
        )


def ids_of(args: Namespace, text: Text, limit: int | None) -> Iterator[int]:
    """Yield a text's token ids, document by document, up to `limit` + 1."""
    left = None if limit is None else limit + 1
    for document in text.documents:
        some = [int(token) for token in document[:left]]
        load_model.check_vocabulary(args, max(some, default=0), text.name)
        yield from some
        if left is not None:
            left -= len(some)
            if left <= 0:
                return


def windows(ids: Iterable[int], size: int) -> Iterator[list[int]]:
    """Yield windows of `size` + 1 tokens; the last one may be shorter.

    Each begins with the last token of the one before, so every token but the first is predicted
    once.
    """
    stream = iter(ids)
    window = list(islice(stream, size + 1))
    while len(window) > 1:
        yield window
        window = [window[-1], *islice(stream, size)]
