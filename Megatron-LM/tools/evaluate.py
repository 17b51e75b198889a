"""The loss of a checkpoint on a text, and its scores in tasks: what `mqo eval` prints.

    python Megatron-LM/tools/evaluate.py describe CHECKPOINT FACTS
    python Megatron-LM/tools/evaluate.py run CHECKPOINT FACTS [options] -- PLATFORM_FLAGS
    python Megatron-LM/tools/evaluate.py tasks CHECKPOINT FACTS [options] -- PLATFORM_FLAGS

CHECKPOINT is a folder of checkpoints, or of one iteration; FACTS is written, JSON. The model is
built from the arguments in the checkpoint, and runs this tree's source with its types, without
--data or --text on the validation split of what it was trained on. A user-correctable error is
written to the file that MQO_FAILURE names.
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
class Part:
    """Documents of a text, each an array of token ids, under a name for people.

    `size` is how many tokens they hold.
    """

    name: str
    documents: Iterable[Any]
    size: int = 0

    def predicted(self, limit: int | None) -> int:
        """Return how many tokens have one before them to be predicted from, at most `limit`."""
        return min(self.size - 1, limit or self.size)


def main(argv: list[str]) -> None:
    """Run one of the commands on the arguments, behind `--` those that say what the machine has."""
    at = argv.index("--") if "--" in argv else len(argv)
    given = parser().parse_args(argv[:at])
    # In the place of this folder, whose coverage.py numba would take for the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    import preflight  # noqa: F401  (checks where megatron comes from)
    from megatron.inference.load_model import write_result_or_exit

    write_result_or_exit(lambda: COMMANDS[given.command](given, argv[at + 1 :]), given.facts)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments before `--`."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("command", choices=COMMANDS)
    made.add_argument("checkpoint", type=Path)
    made.add_argument("facts", type=Path)
    made.add_argument("--data", action="append", default=[], help="an indexed dataset, all of it")
    made.add_argument("--text", type=Path, help="a file of plain text")
    made.add_argument("--tokenizer", type=Path, help="for --text; by default the training's")
    made.add_argument("--tokens", type=int, help="how many are predicted at most")
    made.add_argument("--task", action="append", default=[], help="one of lm-evaluation-harness")
    made.add_argument("--tasks-folder", type=Path, help="YAML of further tasks")
    made.add_argument("--limit", type=int, help="documents of a task, at most")
    made.add_argument("--num-fewshot", type=int, help="examples before a question")
    made.add_argument("--ignore-argument", action="append", default=[], help="unknown argument")
    return made


def describe(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """Return the folder of the newest iteration, and {site: quant type} of the step before it.

    `rows` says whether a recipe had rows for operands or layers, which its run's options hold;
    `modelopt` is what ModelOpt's state quantizes, if there is one.
    """
    from megatron.inference import load_model
    from megatron.inference.checkpoint_args import common_state
    from mqo.megatron.run.modelopt import QUANTIZED_AS, STATE, describe_state
    from mqo.megatron.run.resumed_types import ROWS

    del platform
    folder = load_model.find_checkpoint(given.checkpoint)
    args = load_model.read_args(folder)
    types = load_model.types_of(args, folder)
    state = common_state(folder / STATE) if (folder / STATE).is_dir() else {}
    modelopt = describe_state(state, getattr(args, QUANTIZED_AS, None))
    rows = bool(getattr(args, ROWS, None))
    return {"folder": str(folder), "types": types, "rows": rows, "modelopt": modelopt}


def run(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """Measure the mean loss in nats per token, and say over what it was taken."""
    from megatron.inference import load_model
    from mqo.megatron.run.progress import advance

    folder = load_model.find_checkpoint(given.checkpoint)
    before = load_model.read_args(folder)
    args, model = load_model.load(folder, before, platform, given.ignore_argument)
    texts = parts(args, given)
    started = time.monotonic()
    limit = given.tokens and max(1, given.tokens // len(texts))
    total, done = sum(part.predicted(limit) for part in texts), 0
    sums = []
    for part in texts:
        told = partial(lambda before, more: advance("tokens", before + more, total), done)
        sums.append(measured(model, args, part, limit, told))
        done += sums[-1][1]
    loss, tokens = (sum(column) for column in zip(*sums, strict=True))
    return {
        "loss": loss / tokens,
        "tokens": tokens,
        "text": [part.name for part in texts],
        "seconds": time.monotonic() - started,
        **described(args, folder),
    }


def tasks(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """Score a model in the tasks, which are made before its weights are read."""
    from megatron.inference import load_model
    from megatron.inference.tasks import registry
    from megatron.inference.tasks.model import SavedModel
    from megatron.inference.tasks.scores import evaluate
    from mqo.megatron.run.progress import advance

    folder = load_model.find_checkpoint(given.checkpoint)
    saved = load_model.read_args(folder)
    args = load_model.arguments_here(folder, saved, platform, given.ignore_argument)
    tokenizer = load_model.tokenizer_of(args, given.tokenizer)
    if tokenizer.eod is None:
        raise load_model.SavedError(
            "The tokenizer has no end-of-document token", "one, which stands before a text"
        )
    texts = partial(documents, args, given, tokenizer)
    loaded = registry.load(given.task, given.tasks_folder, texts)
    registry.check(loaded["tasks"].values(), args.seq_length)
    started = time.monotonic()
    args, model = load_model.load(folder, saved, platform, given.ignore_argument)
    asked = SavedModel(model, args, tokenizer, advance)
    return {
        "scores": evaluate(asked, loaded, given.limit, given.num_fewshot),
        "seconds": time.monotonic() - started,
        **described(args, folder),
    }


def described(args: Namespace, folder: Path) -> dict[str, Any]:
    """Describe what was measured: the weights, their dtype, and how much of a text they see."""
    from megatron.inference.load_model import iteration
    from mqo.megatron.run.modelopt import QUANTIZED_AS

    return {
        "window": args.seq_length,
        "iteration": iteration(folder),
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "modelopt": getattr(args, QUANTIZED_AS, None),
    }


def documents(args: Namespace, given: Namespace, tokenizer: Any) -> Iterator[str]:
    """Yield the documents of what is to be read as text, as many as are asked for at most.

    Raises:
        SavedError: there is none, or it holds ids that the model has not.
    """
    from megatron.inference.load_model import check_vocabulary

    each = ((part.name, ids) for part in parts(args, given) for ids in part.documents)
    for name, document in islice(each, given.limit):
        ids = [int(token) for token in document]
        check_vocabulary(args, max(ids, default=0), name)
        yield tokenizer.detokenize([token for token in ids if token != tokenizer.eod])


def parts(args: Namespace, given: Namespace) -> list[Part]:
    """Return what is to be read: the given text, else the validation split of the training's.

    Raises:
        SavedError: there is no such file, no validation split, or no fitting tokenizer.
    """
    from megatron.inference.load_model import tokenizer_of
    from mqo.megatron.run.errors import reading
    from mqo.megatron.run.untrusted import Limit, read_text

    if given.text:
        tokenizer = tokenizer_of(args, given.tokenizer)
        with reading():
            text = read_text(given.text, Limit.TEXT)
        ids = tokenizer.tokenize(text)
        return [Part(given.text.name, [ids], len(ids))]
    if given.data:
        return [part_of(prefix, (0, 1), Path(prefix).name) for prefix in given.data]
    prefixes, share = held_out(args)
    return [part_of(p, share, f"{Path(p).name}, validation split") for p in prefixes]


def held_out(args: Namespace) -> tuple[list[str], tuple[float, float]]:
    """Return the prefixes that the training validated on, and the share of each one's documents.

    Raises:
        SavedError: it had none.
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
            "The training held no text out: it had no validation split",
            "data that it was not trained on",
            "Name some with --data or --text",
        )
    return blend[0], share


def part_of(prefix: str, share: tuple[float, float], name: str) -> Part:
    """Return a share of an index's documents, in order; bounds are as upstream rounds them.

    Raises:
        SavedError: there is no such index.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.inference.load_model import SavedError

    missing = [p for p in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")) if not p.is_file()]
    if missing:
        raise SavedError(
            f"There is no {missing[0]}", "an indexed dataset", "Name another one with --data"
        )
    index = IndexedDataset(prefix)
    first, last = (round(bound * len(index)) for bound in share)
    size = int(index.sequence_lengths[first:last].sum())
    return Part(name, (index[n] for n in range(first, last)), size)


def measured(
    model: Any,
    args: Namespace,
    part: Part,
    limit: int | None,
    told: Callable[[int], None] = lambda tokens: None,
) -> tuple[float, int]:
    """Return the sum of a text's token losses in nats, and how many tokens were predicted.

    `told` gets that number after each batch.

    Raises:
        SavedError: the text is shorter than a window, or holds ids that the model has not.
    """
    from megatron.inference.load_model import SavedError, batches, watched_step

    total, tokens = 0.0, 0
    for batch in batches(
        windows(ids_of(args, part, limit), args.seq_length), args.micro_batch_size
    ):
        with watched_step(model, args):
            losses = token_losses(model, batch)
        total += losses.double().sum().item()
        tokens += losses.numel()
        told(tokens)
    wanted = min(limit or args.seq_length, args.seq_length)
    if tokens < wanted:
        raise SavedError(
            f"{part.name} holds {tokens + (tokens > 0)} tokens",
            f"at least {wanted + 1}, one window and the token behind it",
            "Name a longer text, or fewer tokens with --tokens",
        )
    return total, tokens


def ids_of(args: Namespace, part: Part, limit: int | None) -> Iterator[int]:
    """Yield a text's token ids, document by document, so that `limit` can be predicted."""
    from megatron.inference.load_model import check_vocabulary

    left = None if limit is None else limit + 1
    for document in part.documents:
        some = [int(token) for token in document[:left]]
        check_vocabulary(args, max(some, default=0), part.name)
        yield from some
        if left is not None:
            left -= len(some)
            if left <= 0:
                return


def windows(ids: Iterable[int], size: int) -> Iterator[list[int]]:
    """Yield stretches of `size` + 1 tokens, the last one maybe shorter.

    Each begins with the last token of the one before: every token is predicted once, but for the
    first of all.
    """
    stream = iter(ids)
    window = list(islice(stream, size + 1))
    while len(window) > 1:
        yield window
        window = [window[-1], *islice(stream, size)]


def token_losses(model: Any, batch: list[list[int]]) -> Any:
    """Return the loss of each token but a row's first, in nats, float32: [rows, length - 1]."""
    import torch
    from mqo.megatron.device import accelerator_type

    ids = torch.tensor(batch, device=accelerator_type())
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(tokens.size(1), device=ids.device).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, None, labels=labels).float()


COMMANDS = {"describe": describe, "run": run, "tasks": tasks}

if __name__ == "__main__":
    main(sys.argv[1:])
