"""Tokenises JSON lines into the .bin/.idx pair that Megatron's datasets read.

    PYTHONPATH=Megatron-LM python Megatron-LM/tools/preprocess_data.py \\
        --input text.jsonl --output-prefix data/mine \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/ --append-eod

writes data/mine_text_document.bin and .idx; training takes `--data-path data/mine_text_document`.
One JSON object a line, one document an object; a name that ends in .gz is unpacked on the way. The
last line of the output is JSON: documents, tokens, and documents skipped because they were empty.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH = (
    256  # documents a call: enough to keep all threads busy, few enough to stay small in memory
)


@dataclass(frozen=True)
class Counts:
    """Documents and tokens written (end-of-document tokens included), empty documents left out."""

    documents: int
    tokens: int
    skipped: int


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; names as in upstream's tool of the same name."""
    parser = argparse.ArgumentParser(
        description="Tokenise JSON lines into Megatron's .bin/.idx pair.", allow_abbrev=False
    )
    parser.add_argument("--input", type=Path, required=True, help="JSON lines, .gz or plain")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="one pair of files a key"
    )
    parser.add_argument(
        "--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument(
        "--tokenizer-type", choices=["HuggingFaceTokenizer"], default="HuggingFaceTokenizer"
    )
    parser.add_argument(
        "--tokenizer-model",
        type=Path,
        required=True,
        help="folder with tokenizer.json and tokenizer_config.json",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end every document with the tokenizer's EOS"
    )
    parser.add_argument("--workers", type=int, default=1, help="threads of the tokenizer")
    parser.add_argument("--log-interval", type=int, default=10000, help="documents a progress line")
    return parser.parse_args(argv)


def load_tokenizer(folder: Path) -> tuple[Tokenizer, int | None]:
    """The tokenizer of a folder in Hugging Face's layout, and the id of its EOS token, if any."""
    # tokenizers alone reads these files; transformers would add seconds to every start.
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception
        sys.exit(
            f"{folder}: no readable tokenizer.json with tokenizer_config.json beside it ({error})"
        )
    # A document that spells out a marker is text about markers, and must not end there.
    tokenizer.encode_special_tokens = True
    eos = config.get("eos_token")
    if isinstance(eos, dict):
        eos = eos["content"]
    return tokenizer, None if eos is None else tokenizer.token_to_id(eos)


def read_documents(path: Path, keys: list[str]) -> Iterator[tuple[str, ...]]:
    """The texts under `keys`, line by line; a bad line ends the program, which names the line."""
    opener = gzip.open if path.suffix == ".gz" else Path.open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
                texts = tuple(document[key] for key in keys)
            except (ValueError, KeyError, TypeError) as error:
                sys.exit(
                    f"{path}, line {number}: no JSON object with {', '.join(keys)} ({error!r})"
                )
            if not all(isinstance(text, str) for text in texts):
                sys.exit(f"{path}, line {number}: {', '.join(keys)} must be text")
            yield texts


def batches(documents: Iterator[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Lists of up to _BATCH documents."""
    while batch := list(islice(documents, _BATCH)):
        yield batch


class PairWriter:
    """One .bin/.idx pair under temporary names until it is whole."""

    def __init__(self, prefix: str, vocab_size: int) -> None:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        self._bin, self._idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._partial = [p.with_name(p.name + ".partial") for p in (self._bin, self._idx)]
        # Two bytes a token where the vocabulary allows it.
        dtype = DType.optimal_dtype(vocab_size)
        self._builder = IndexedDatasetBuilder(str(self._partial[0]), dtype=dtype)
        self.documents = self.tokens = self.skipped = 0

    def add(self, ids: list[int], eod: int | None) -> None:
        """Adds a document of token ids, ended by `eod` unless that is None."""
        if not ids:  # a sequence of length zero, or one of a lone EOD, teaches nothing
            self.skipped += 1
            return
        if eod is not None:
            ids = [*ids, eod]
        self._builder.add_document(ids, [len(ids)])
        self.documents += 1
        self.tokens += len(ids)

    def finish(self) -> Counts:
        """Writes the index and gives both files their names."""
        self._builder.finalize(str(self._partial[1]))
        # An index of older data must at no time stand beside the new data.
        self._idx.unlink(missing_ok=True)
        self._partial[0].replace(self._bin)
        self._partial[1].replace(self._idx)
        return Counts(self.documents, self.tokens, self.skipped)


class Progress:
    """Prints the count and speed about every `interval` documents."""

    def __init__(self, interval: int) -> None:
        self._interval, self._start = interval, time.monotonic()
        self._done, self._next = 0, interval

    def add(self, documents: int) -> None:
        """Counts `documents` more."""
        self._done += documents
        if self._done >= self._next:
            self._next = self._done + self._interval
            speed = self._done / (time.monotonic() - self._start)
            print(f"{self._done} documents, {speed:.0f} a second", flush=True)


def run(args: argparse.Namespace) -> Counts:
    """Tokenises the whole input; returns the counts summed over the keys."""
    tokenizer, eod = load_tokenizer(args.tokenizer_model)
    if args.append_eod and eod is None:
        sys.exit(
            f"{args.tokenizer_model}: --append-eod needs an eos_token that the vocabulary holds"
        )
    if not args.append_eod:
        eod = None
    if not args.input.is_file():
        sys.exit(f"{args.input}: no such file")
    size = tokenizer.get_vocab_size()
    writers = [PairWriter(f"{args.output_prefix}_{k}_document", size) for k in args.json_keys]
    progress = Progress(args.log_interval)
    for batch in batches(read_documents(args.input, args.json_keys)):
        for writer, texts in zip(writers, zip(*batch, strict=True), strict=True):
            for encoding in tokenizer.encode_batch_fast(list(texts)):
                writer.add(encoding.ids, eod)
        progress.add(len(batch))
    if not any(w.documents for w in writers):
        sys.exit(f"{args.input}: no document with any text")
    parts = [writer.finish() for writer in writers]
    return Counts(
        documents=sum(p.documents for p in parts),
        tokens=sum(p.tokens for p in parts),
        skipped=sum(p.skipped for p in parts),
    )


def main() -> None:
    """Runs the command line; the last line printed is the counts as JSON."""
    args = parse_args()
    # Read by the tokenizer's thread pool when it starts, so set before the first encoding.
    os.environ["RAYON_NUM_THREADS"] = str(max(1, args.workers))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if args.workers > 1 else "false"
    print(json.dumps(asdict(run(args))))


if __name__ == "__main__":
    main()
