"""Write a corpus as Megatron's pairs of .bin and .idx, with the builder of megatron.core.

It runs in the process of preprocess_data.py, which can import Megatron; `mqo` itself does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from filelock import FileLock, Timeout

from mqo.data import corpus
from mqo.data.encode import Encoder
from mqo.display import Say
from mqo.errors import DataError, MissingError, full_disk_of
from mqo.output import target_of

_SHOWN = 20  # bad documents that are reported one by one


@dataclass
class Counts:
    """What was indexed, summed over the keys.

    `tokens` includes end-of-document tokens. `skipped` are empty documents, `bad` unusable ones.
    """

    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    bad: int = 0


@dataclass(frozen=True)
class IndexJob:
    """The corpus to index, and the files to write.

    Each of `keys` is a field of a document, and gets its own pair PREFIX_KEY_document.bin, .idx.
    `eod` ends each document with the encoder's end-of-document id. `strict` stops at a bad
    document.
    """

    files: Sequence[Path]
    kind: str
    keys: tuple[str, ...]
    encoder: Encoder
    prefix: Path
    eod: bool = True
    strict: bool = False


Watch = Callable[[int, int, Counts], None]


def index(job: IndexJob, say: Say, watch: Watch = lambda done, total, counts: None) -> Counts:
    """Index the corpus of `job` and return the counts.

    The files are renamed to their final names after all are complete. `watch` gets the bytes read,
    the bytes of all files, and the counts.

    Raises:
        DataError: the corpus has no text, a file cannot be read, a document is bad if strict, the
            encoder has no end-of-document token, or another process writes there.
    """
    if not job.prefix.name:
        raise DataError(f"{job.prefix} is not a file", expected="the prefix of the files to write")
    if job.eod and job.encoder.eod is None:
        raise DataError(
            "The tokenizer does not name a token that ends a document",
            expected="an eos_token in tokenizer_config.json that the vocabulary holds",
        )
    finals = {key: job.prefix.with_name(f"{job.prefix.name}_{key}_document") for key in job.keys}
    for final in finals.values():
        for end in (".bin", ".idx"):
            target_of(final.with_name(final.name + end))
    with full_disk_of(job.prefix.parent), _aside(job.prefix) as folder:
        counts = _fill(job, folder, say, watch)
        for key, final in finals.items():
            # An index of older data must never exist next to the new data.
            final.with_name(f"{final.name}.idx").unlink(missing_ok=True)
            for end in (".bin", ".idx"):
                (folder / f"{key}{end}").replace(final.with_name(final.name + end))
    if counts.bad:
        say(f"{counts.bad:,} documents were unusable and left out")
    return counts


@contextmanager
def _aside(prefix: Path) -> Iterator[Path]:
    """Yield the folder for incomplete files; the end of the block removes it.

    Files of a killed process are overwritten. DataError if another process works in it.
    """
    folder = target_of(prefix.with_name(prefix.name + ".partial"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            try:
                yield folder
            finally:
                rmtree(folder)
    except Timeout:
        raise DataError(
            f"Another process is writing {prefix}", help="Wait for it, or give another output"
        ) from None


def _fill(job: IndexJob, folder: Path, say: Say, watch: Watch) -> Counts:
    """Write KEY.bin and KEY.idx of each key into `folder`."""
    builders = {key: _builder(folder / f"{key}.bin", job.encoder.vocab_size) for key in job.keys}
    counts, done = Counts(), 0
    total = sum(file.stat().st_size for file in job.files)
    for file in job.files:
        for chunk in corpus.read(file, job.kind, job.keys):
            good = _good(job, file, chunk, counts, say)
            for number, builder in enumerate(builders.values()):
                _add(job, builder, [texts[number] for texts in good], counts)
            watch(done + chunk.position, total, counts)
        done += file.stat().st_size
    if not counts.documents:
        raise DataError(
            f"No document has text in {job.files[0]}" + (" ..." if job.files[1:] else ""),
            expected=f"documents with {', '.join(job.keys)}",
        )
    for key, builder in builders.items():
        builder.finalize(str(folder / f"{key}.idx"))
    return counts


def _builder(path: Path, vocab_size: int) -> Any:
    """Return core's IndexedDatasetBuilder of a .bin file."""
    try:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    except ModuleNotFoundError as error:
        raise no_tree(str(error)) from error
    return IndexedDatasetBuilder(str(path), dtype=DType.optimal_dtype(vocab_size))


def no_tree(why: str) -> MissingError:
    """Return the error for a tree without Megatron."""
    expected = "Megatron, whose builder writes the index"
    return MissingError(why, expected=expected, help="`mqo setup` makes the tree")


def _add(job: IndexJob, builder: Any, texts: Sequence[str], counts: Counts) -> None:
    """Add the texts of one key. Skip texts without ids, which would be empty sequences."""
    end = [job.encoder.eod] if job.eod and job.encoder.eod is not None else []
    encoded = [ids + end for ids in job.encoder.encode([text for text in texts if text]) if ids]
    for ids in encoded:
        builder.add_document(ids, [len(ids)])
    counts.documents += len(encoded)
    counts.tokens += sum(map(len, encoded))
    counts.skipped += len(texts) - len(encoded)


def _good(
    job: IndexJob, file: Path, chunk: corpus.Chunk, counts: Counts, say: Say
) -> list[tuple[str, ...]]:
    """Return the texts of a chunk's documents; report and count those that have none."""
    good = []
    for line, texts in corpus.documents(chunk, job.keys):
        if not isinstance(texts, corpus.Fault):
            good.append(texts)
            continue
        fault = f"{file}:{line}: {texts.reason}"
        if job.strict:
            raise DataError(
                fault, help="Correct the line, or leave out --strict to skip such lines"
            )
        if counts.bad <= _SHOWN:
            say(fault if counts.bad < _SHOWN else "More bad documents are counted, but not shown")
        counts.bad += 1
    return good
