"""Index a corpus in a process of its own, with the flags of upstream's tool preprocess_data.py.

Megatron-LM/tools/preprocess_data.py starts this module with the tree on Python's path, and
`build_index` runs that program for `mqo`. The last line of the output is JSON: documents, tokens,
empty documents skipped, bad lines left out.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mqo.data import encode
from mqo.data.corpus import KINDS, find
from mqo.data.pipeline import Counts, IndexJob, index, no_tree
from mqo.display import Count, Display, Say
from mqo.errors import DataError, MqoError
from mqo.megatron.run.progress import advance
from mqo.program import ask
from mqo.project import Project
from mqo.terminal import guarded

TYPES = ("HuggingFaceTokenizer", "TikTokenizer", "GPT2BPETokenizer")


def parser() -> argparse.ArgumentParser:
    """Return the options; names as in upstream's tool of the same name."""
    options = argparse.ArgumentParser(
        prog="preprocess_data.py",
        description="Tokenize JSON lines into Megatron's .bin/.idx pair.",
        allow_abbrev=False,
    )
    add = options.add_argument
    texts = "files, folders or patterns; .gz and .zst are unpacked"
    add("--input", type=Path, nargs="+", required=True, help=texts)
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="one pair of files per key")
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
    add("--kind", choices=KINDS, default="jsonl", help="the KIND of `mqo data prepare`")
    add("--workers", type=int, default=1, help="threads")
    add("--counts", type=Path, help="also write the counts there")
    add("--partitions", type=int, default=1, help="no effect: the output is the same")
    add("--keep-sequential-samples", action="store_true", help="no effect: samples stay in order")
    add("--log-interval", type=int, default=10_000, help="documents per progress line")
    add("--strict", action="store_true", help="stop at a bad line instead of counting it")
    add("--split-sentences", action="store_true", help="not supported")
    return options


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line, parsed."""
    options = parser()
    args = options.parse_args(argv)
    if args.workers < 1:
        options.error("--workers must be 1 or more")
    if args.split_sentences:
        options.error(
            "--split-sentences is only for BERT and T5, which are not trained here; "
            "without it, each document is one sequence"
        )
    return args


def load_tokenizer(args: argparse.Namespace) -> encode.Encoder:
    """Return the tokenizer that the flags name; DataError if a flag or its file is missing."""
    names = ["vocab_file", "merge_file"] if args.tokenizer_type == TYPES[2] else ["tokenizer_model"]
    for name in names:
        if getattr(args, name) is None:
            flag = f"--{name.replace('_', '-')}"
            raise DataError(f"{args.tokenizer_type} needs {flag}", help=f"Give {flag} PATH")
    if args.tokenizer_type == TYPES[2]:
        return encode.gpt2(args.vocab_file, args.merge_file)
    path = args.tokenizer_model
    if args.tokenizer_type == TYPES[1] and path.suffix == ".json":
        options = args.tiktoken_pattern, args.tiktoken_num_special_tokens, args.vocab_size
        return encode.tekken(path, *options)
    return encode.load(path)


def run(args: argparse.Namespace) -> dict[str, int]:
    """Tokenize the whole input; return the counts, summed over the keys."""
    os.environ |= {"RAYON_NUM_THREADS": str(args.workers), "TOKENIZERS_PARALLELISM": "true"}
    files, keys = find(args.input, args.kind), tuple(args.json_keys)
    encoder = load_tokenizer(args)
    job = IndexJob(
        files, args.kind, keys, encoder, args.output_prefix, eod=args.append_eod, strict=args.strict
    )
    shown, messages = 0, []

    def watch(done: int, total: int, counts: Counts) -> None:
        nonlocal shown
        advance("MB", done // 10**6, total // 10**6)
        if counts.documents - shown >= args.log_interval:
            shown = counts.documents
            print(f"{counts.documents:,} documents, {counts.tokens:,} tokens", flush=True)

    def say(line: str) -> None:
        messages.append(line)
        print(line, flush=True)

    counts = asdict(index(job, say, watch))
    if args.counts:
        args.counts.write_text(json.dumps({"counts": counts, "said": messages}), encoding="utf-8")
    return counts


def build_index(
    kind: str,
    inputs: Sequence[Path],
    tokenizer: Path,
    prefix: Path,
    *,
    key: str = "text",
    workers: int = 1,
    strict: bool = False,
    report: Say,
) -> Counts:
    """Index a corpus in a process with Megatron; `report` gets its messages and the progress.

    Raises:
        DataError: raised by the program; see `index`.
        RunError: the program failed.
    """
    words = ["--kind", kind, "--input", *map(str, inputs), "--output-prefix", str(prefix)]
    words += ["--tokenizer-model", str(tokenizer), "--json-keys", key, "--append-eod"]
    words += ["--workers", str(workers), *(["--strict"] if strict else [])]
    program = Project.here().tree / "tools/preprocess_data.py"
    if not program.is_file():
        raise no_tree(f"{program} does not exist")
    display = Display.around(report)
    with display.live():
        watch = Count(display, "indexed").show
        facts = ask(program, [*words, "--counts"], error=DataError, watch=watch)
    for line in facts["said"]:
        report(line)
    return Counts(**facts["counts"])


def main() -> None:
    """Run the command line; the last line printed is the counts as JSON."""
    guarded(_main, "preprocess_data")


def _main() -> None:
    try:
        print(json.dumps(run(parse_args())))
    except MqoError as error:
        if path := os.environ.get("MQO_FAILURE"):
            facts = {"found": error.found, "expected": error.expected, "help": error.help}
            Path(path).write_text(json.dumps(facts), encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
