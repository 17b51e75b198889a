"""Compute the loss of a checkpoint on a text, or its scores in tasks, for `mqo eval`.

`mqo sensitivity` uses it, too.

    python Megatron-LM/tools/evaluate.py describe CHECKPOINT FACTS
    python Megatron-LM/tools/evaluate.py run CHECKPOINT FACTS [options] -- PLATFORM_FLAGS
    python Megatron-LM/tools/evaluate.py tasks CHECKPOINT FACTS [options] -- PLATFORM_FLAGS
    python Megatron-LM/tools/evaluate.py sensitivity CHECKPOINT FACTS [options] -- PLATFORM_FLAGS

CHECKPOINT is a folder of checkpoints, or of one iteration; the result is written to FACTS, as JSON.
The model is built from the arguments in the checkpoint, and runs the source of this tree with its
quant types. Without --data or --text it reads the validation split of its training data. A
user-correctable error is written to the file that MQO_FAILURE names.
"""

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VALIDATION = 1  # of upstream's three splits


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


def main(argv: list[str]) -> None:
    """Run a command; the arguments after `--` are Megatron's flags for this machine."""
    at = argv.index("--") if "--" in argv else len(argv)
    given = parser().parse_args(argv[:at])
    # Remove this folder from the path: numba would import its coverage.py as the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    import preflight  # noqa: F401  (checks where megatron comes from)
    from megatron.inference.load_model import write_result_or_exit

    write_result_or_exit(lambda: COMMANDS[given.command](given, argv[at + 1 :]), given.facts)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments before `--`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--data", action="append", default=[], help="a whole indexed dataset")
    parser.add_argument("--text", type=Path, help="a file of plain text")
    parser.add_argument("--tokenizer", type=Path, help="for --text; default: the training's")
    parser.add_argument("--tokens", type=int, help="largest number of tokens to predict")
    parser.add_argument("--by", default="block", help="kind of the subsets that are quantized")
    parser.add_argument("--task", action="append", default=[], help="lm-evaluation-harness task")
    parser.add_argument("--tasks-folder", type=Path, help="a folder with YAML of more tasks")
    parser.add_argument("--limit", type=int, help="largest number of documents per task")
    parser.add_argument("--num-fewshot", type=int, help="number of examples before each question")
    parser.add_argument(
        "--ignore-argument", action="append", default=[], help="an unknown argument to ignore"
    )
    return parser


def checkpoint_facts(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """Return the folder of the newest iteration, and the {site: quant type} of its last step.

    `rows` says whether a recipe had rows for operands or layers, which are in the run's options.
    `formats` has the digests of the user's formats, `plugins` the versions and options of custom
    quantizers, and `modelopt` describes what ModelOpt's state quantizes, if the checkpoint has one.
    """
    from megatron.inference import load_model
    from megatron.inference.checkpoint_args import common_state
    from mqo.megatron.run.modelopt import QUANTIZED_AS, STATE, describe_state
    from mqo.megatron.run.resumed_types import FORMATS, PLUGINS, ROWS

    del platform
    folder = load_model.find_checkpoint(given.checkpoint)
    args = load_model.read_args(folder)
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


def run(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """Measure the mean loss in nats per token; return it with the texts and token counts."""
    from mqo.megatron.run.progress import advance

    folder, args, model, texts, limit = loaded_with_texts(given, platform)
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


def tasks(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """Score a model in the tasks, which are built before its weights are read."""
    from megatron.inference import load_model
    from megatron.inference.tasks import registry
    from megatron.inference.tasks.model import HarnessModel
    from megatron.inference.tasks.scores import evaluate
    from mqo.megatron.run.progress import advance

    folder = load_model.find_checkpoint(given.checkpoint)
    saved = load_model.read_args(folder)
    args = load_model.arguments_here(folder, saved, platform, given.ignore_argument)
    tokenizer = load_model.tokenizer_of(args, given.tokenizer)
    if tokenizer.eod is None:
        raise load_model.SavedError(
            "The tokenizer has no end-of-document token", "a token to begin a text with"
        )
    texts = partial(documents, args, given, tokenizer)
    loaded = registry.load(given.task, given.tasks_folder, texts)
    registry.check(loaded["tasks"].values(), args.seq_length)
    started = time.monotonic()
    args, model = load_model.load(folder, saved, platform, given.ignore_argument)
    wrapped = HarnessModel(model, args, tokenizer, advance)
    return {
        "scores": evaluate(wrapped, loaded, given.limit, given.num_fewshot),
        "seconds": time.monotonic() - started,
        **described(args, folder),
    }


def sensitivity(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """Measure how the loss and the gradient change with one subset quantized at a time."""
    from megatron.inference import sensitivity
    from mqo.megatron.run.progress import advance

    folder, args, model, texts, limit = loaded_with_texts(given, platform)
    started = time.monotonic()
    batches = [batch for text in texts for batch in batches_of(args, text, limit)]
    measured = sensitivity.measure(model, args, batches, given.by, partial(advance, "subsets"))
    return {
        "text": [text.name for text in texts],
        "seconds": time.monotonic() - started,
        **measured,
        **described(args, folder),
    }


def loaded_with_texts(
    given: Namespace, platform: list[str]
) -> tuple[Path, Namespace, Any, list[Text], int | None]:
    """Return the checkpoint's folder, its arguments and model, and the texts to measure.

    The last element is the largest number of tokens to predict of each text, None for all.
    """
    from megatron.inference import load_model

    folder = load_model.find_checkpoint(given.checkpoint)
    before = load_model.read_args(folder)
    args, model = load_model.load(folder, before, platform, given.ignore_argument)
    texts = chosen_texts(args, given)
    limit = given.tokens and max(1, given.tokens // len(texts))
    return folder, args, model, texts, limit


def described(args: Namespace, folder: Path) -> dict[str, Any]:
    """Return the facts that both results share: window, iteration, dtype and ModelOpt's format."""
    from mqo.megatron.run.files import iteration_of
    from mqo.megatron.run.modelopt import QUANTIZED_AS

    return {
        "window": args.seq_length,
        "iteration": iteration_of(folder),
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "modelopt": getattr(args, QUANTIZED_AS, None),
    }


def documents(args: Namespace, given: Namespace, tokenizer: Any) -> Iterator[str]:
    """Yield up to `given.limit` documents of the chosen texts, detokenized.

    Raises:
        SavedError: a text is missing, or has token ids outside of the vocabulary.
    """
    from megatron.inference.load_model import check_vocabulary

    each = ((text.name, ids) for text in chosen_texts(args, given) for ids in text.documents)
    for name, document in islice(each, given.limit):
        ids = [int(token) for token in document]
        check_vocabulary(args, max(ids, default=0), name)
        yield tokenizer.detokenize([token for token in ids if token != tokenizer.eod])


def chosen_texts(args: Namespace, given: Namespace) -> list[Text]:
    """Return the texts to read: --text, --data, or the validation split of the training.

    Raises:
        SavedError: a file is missing, or there is no validation split or suitable tokenizer.
    """
    from megatron.inference.load_model import tokenizer_of
    from mqo.megatron.run.errors import reading
    from mqo.megatron.run.untrusted import Limit, read_text

    if given.text:
        tokenizer = tokenizer_of(args, given.tokenizer)
        with reading():
            text = read_text(given.text, Limit.TEXT)
        ids = tokenizer.tokenize(text)
        return [Text(given.text.name, [ids], len(ids))]
    if given.data:
        return [indexed_text(prefix, (0, 1), Path(prefix).name) for prefix in given.data]
    prefixes, share = held_out(args)
    return [indexed_text(p, share, f"{Path(p).name}, validation split") for p in prefixes]


def held_out(args: Namespace) -> tuple[list[str], tuple[float, float]]:
    """Return the prefixes of the validation data, and which share of their documents it is.

    Raises:
        SavedError: the training had no validation split.
    """
    from megatron.core.datasets import blended_megatron_dataset_config as splits
    from megatron.inference.load_model import SavedError
    from megatron.training.utils.common_utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    share = (0.0, 1.0)
    if per_split:
        blend = per_split[VALIDATION]
    elif blend:
        vector = splits.parse_and_normalize_split(args.split)
        share = splits.convert_split_vector_to_split_matrix(vector)[VALIDATION]
    if not blend or share is None:
        raise SavedError(
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
    from megatron.inference.load_model import SavedError

    missing = [p for p in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")) if not p.is_file()]
    if missing:
        raise SavedError(
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
    from megatron.inference.load_model import watched_step

    total, tokens = 0.0, 0
    for batch in batches_of(args, text, limit):
        with watched_step(model, args):
            losses = token_losses(model, batch)
        total += losses.double().sum().item()
        tokens += losses.numel()
        told(tokens)
    return total, tokens


def batches_of(args: Namespace, text: Text, limit: int | None) -> Iterator[list[list[int]]]:
    """Yield batches of windows of a text, with `limit` predicted tokens at most.

    Raises:
        SavedError: the text is shorter than a window, or has ids outside of the vocabulary.
    """
    from megatron.inference.load_model import SavedError, batches

    tokens = 0
    for batch in batches(
        windows(ids_of(args, text, limit), args.seq_length), args.micro_batch_size
    ):
        tokens += sum(len(window) - 1 for window in batch)
        yield batch
    wanted = min(limit or args.seq_length, args.seq_length)
    if tokens < wanted:
        raise SavedError(
            f"{text.name} holds {tokens + (tokens > 0)} tokens",
            f"at least {wanted + 1}, one window and the token after it",
            "Use a longer text, or a smaller --tokens",
        )


def ids_of(args: Namespace, text: Text, limit: int | None) -> Iterator[int]:
    """Yield a text's token ids, document by document, up to `limit` + 1."""
    from megatron.inference.load_model import check_vocabulary

    left = None if limit is None else limit + 1
    for document in text.documents:
        some = [int(token) for token in document[:left]]
        check_vocabulary(args, max(some, default=0), text.name)
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


def token_losses(model: Any, batch: list[list[int]]) -> Any:
    """Return the losses of all tokens but a row's first, in nats, without gradients."""
    import torch
    from megatron.inference import load_model

    with torch.no_grad():
        return load_model.token_losses(model, batch)


COMMANDS = {"describe": checkpoint_facts, "run": run, "tasks": tasks, "sensitivity": sensitivity}

if __name__ == "__main__":
    main(sys.argv[1:])
