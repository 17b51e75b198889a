"""Tokenize JSON lines into a .bin/.idx pair, by the flags of upstream's tool preprocess_data.py.

Megatron-LM/tools/preprocess_data.py starts this module; the work is `mqo data prepare`'s. The last
line of the output is JSON: documents, tokens, empty documents skipped, bad lines left out.
"""

import argparse
import json
from pathlib import Path

from mqo.data import allocator, encode
from mqo.data.corpus import find
from mqo.data.meter import Meter
from mqo.data.pipeline import Job, index
from mqo.errors import DataError
from mqo.terminal import guarded

TYPES = ("HuggingFaceTokenizer", "TikTokenizer", "GPT2BPETokenizer")


def parser() -> argparse.ArgumentParser:
    """Return the options; names as in upstream's tool of the same name."""
    made = argparse.ArgumentParser(
        prog="preprocess_data.py",
        description="Tokenize JSON lines into Megatron's .bin/.idx pair.",
        allow_abbrev=False,
    )
    add = made.add_argument
    texts = "files, folders or patterns of JSON lines or parquet; .gz and .zst are unpacked"
    add("--input", type=Path, nargs="+", required=True, help=texts)
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="one pair of files a key")
    add("--output-prefix", type=Path, required=True, help="writes PREFIX_KEY_document.bin and .idx")
    add("--tokenizer-type", choices=TYPES, default=TYPES[0])
    folder = "HuggingFaceTokenizer: a folder with tokenizer.json and tokenizer_config.json"
    ranks = "TikTokenizer: a JSON list of tokens, or a file of ranks"
    add("--tokenizer-model", type=Path, help=f"{folder}; {ranks}")
    add("--vocab-file", type=Path, help="GPT2BPETokenizer: vocab.json")
    add("--merge-file", type=Path, help="GPT2BPETokenizer: merges.txt")
    add("--vocab-size", type=int, default=encode.TEKKEN_SIZE, help="of TikTokenizer's list")
    add("--tiktoken-pattern", choices=encode.TEKKEN_PATTERNS, default="v2")
    add("--tiktoken-num-special-tokens", type=int, default=encode.TEKKEN_SPECIAL)
    add("--append-eod", action="store_true", help="end every document with the tokenizer's EOS")
    add("--workers", type=int, default=1, help="processes")
    add("--partitions", type=int, default=1, help="taken and not needed: the output is the same")
    add("--keep-sequential-samples", action="store_true", help="taken and not needed: they are")
    add("--log-interval", type=int, default=10_000, help="documents a progress line")
    add("--strict", action="store_true", help="stop at a bad line, rather than count it")
    add("--split-sentences", action="store_true", help="refused: see the message")
    return made


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line, parsed."""
    options = parser()
    args = options.parse_args(argv)
    if args.split_sentences:
        options.error(
            "--split-sentences serves BERT and T5 only, which nothing here trains; "
            "leave it out, and each document stays one sequence"
        )
    return args


def load_tokenizer(args: argparse.Namespace) -> encode.Encoder:
    """Return the tokenizer that the flags name; DataError where a flag or its file is missing."""
    names = ["vocab_file", "merge_file"] if args.tokenizer_type == TYPES[2] else ["tokenizer_model"]
    for name in names:
        if getattr(args, name) is None:
            flag = f"--{name.replace('_', '-')}"
            raise DataError(f"{args.tokenizer_type} was given no {flag}", help=f"Give {flag} PATH")
    if args.tokenizer_type == TYPES[2]:
        return encode.gpt2(args.vocab_file, args.merge_file)
    path = args.tokenizer_model
    if args.tokenizer_type == TYPES[1] and path.suffix == ".json":
        options = args.tiktoken_pattern, args.tiktoken_num_special_tokens, args.vocab_size
        return encode.tekken(path, *options)
    return encode.load(path)


def run(args: argparse.Namespace) -> dict[str, int]:
    """Tokenize the whole input; return the counts, summed over the keys."""
    files = tuple(find(args.input, "jsonl"))
    keys, encoder = tuple(args.json_keys), load_tokenizer(args)
    job = Job(files, "jsonl", keys, encoder, args.output_prefix, args.append_eod, args.strict)
    state = index(job, args.workers, Meter(print, args.log_interval))
    return {name: getattr(state, name) for name in ("documents", "tokens", "skipped", "bad")}


def main() -> None:
    """Run the command line; the last line printed is the counts as JSON."""
    guarded(lambda: print(json.dumps(run(parse_args()))), "preprocess_data")


if __name__ == "__main__":
    allocator.preload()
    main()
