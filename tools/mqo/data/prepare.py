"""Prepare a named dataset for training, once: fetch, clean, train a tokenizer, index."""

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from mqo.data import mix, sample, tokenizer
from mqo.data.preprocess import build_index
from mqo.display import Say
from mqo.errors import DataError, check_name
from mqo.project import Project
from mqo.untrusted import parse_json, read_json_object, read_lines, sha256_of

DATASETS = ("dolma", "wikipedia")
STAMP = "prepared.json"

# Increase it if a change of the steps below changes their output, so that older data is made again.
# A hash of their source would do that for every new comment, and change the data within a series of
# runs that are to be compared.
_RECIPE = 1


@dataclass(frozen=True)
class PreparedData:
    """A dataset ready for training, and what `--data-path` and `--tokenizer-model` take.

    `text` is a file of JSON lines, `tokenizer` a folder, `prefix` the path of the .bin/.idx pair
    without its endings. `tokens` counts one end-of-document token per document.
    """

    dataset: str
    text: Path
    tokenizer: Path
    prefix: Path
    vocab_size: int
    documents: int
    tokens: int


def _inputs(dataset: str) -> dict[str, str | int]:
    """Return what the outputs depend on; the stamp records it.

    The optional sources of dolma that the machine could fetch are not among them, so that existing
    data stays valid on a machine without a network.
    """
    size = tokenizer.DEFAULT_VOCAB_SIZE
    made_of = {"dataset": dataset, "source_sha256": sample.SHA256}
    return made_of | {"vocab_size": size, "recipe": _RECIPE}


def prepare(project: Project, dataset: str, *, report: Say) -> PreparedData:
    """Prepare `dataset` and return it; do nothing if it is ready.

    It is in `project.data`, or in `project.own_data` if the former lacks it. `report` gets one line
    per step. Several processes may call this (one works, the others wait), and it may be killed at
    any time: a folder counts only with a stamp that fits every file in it. Raises UnknownNameError
    for an unknown dataset, and DataError if a step fails.
    """
    check_name("dataset", dataset, DATASETS)
    # A ready folder is always complete, so reading it needs neither a lock nor write access.
    ready = _load(project.data / dataset, dataset)
    if ready:
        return ready
    target = project.own_data / dataset
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{dataset}.lock", report):
        ready = _load(target, dataset)
        if ready:
            return ready
        _build(project, target, dataset, report)
        ready = _load(target, dataset)
    if ready is None:
        raise DataError(
            f"{target} changed while it was made",
            expected="files that only 'mqo' writes",
            help="Find out what else writes there, and run the command again",
        )
    return ready


@contextmanager
def _locked(path: Path, report: Say) -> Iterator[None]:
    # The system drops this lock with its process, so a killed one does not block others.
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Another process is preparing this dataset; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(project: Project, target: Path, dataset: str, report: Say) -> None:
    """Build next to the target and rename, so that the target is always complete or missing."""
    partial = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.old")
    for leftover in (partial, old):  # of a run that was killed; the lock keeps out living ones
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    _run_steps(project, partial, dataset, report)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _run_steps(project: Project, folder: Path, dataset: str, report: Say) -> None:
    text, words, _ = layout(folder, dataset)
    start = time.monotonic()
    documents: Iterable[sample.Article | mix.Document]
    if dataset == "dolma":
        documents = mix.documents(project.cache, report)
    else:
        documents = sample.articles(sample.fetch(project.cache, report))
    count = sample.write_jsonl(documents, text)
    megabytes = text.stat().st_size / 1e6
    report(f"Cleaned {count} documents, {megabytes:.2f} MB, {_seconds(start)}")

    start = time.monotonic()
    size = tokenizer.DEFAULT_VOCAB_SIZE
    tokenizer.train(_texts(text), words, size)
    report(f"Trained a tokenizer of {size} entries, {_seconds(start)}")

    start = time.monotonic()
    counts = build_index("jsonl", [text], words, folder / dataset, strict=True, report=report)
    report(f"Indexed {counts.documents} documents, {counts.tokens} tokens, {_seconds(start)}")

    stamp = {
        "inputs": _inputs(dataset),
        "documents": counts.documents,
        "tokens": counts.tokens,
        "files": _fingerprints(folder),
    }
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")


def layout(folder: Path, dataset: str) -> tuple[Path, Path, Path]:
    """Return the text, the tokenizer's folder and the index's prefix of a dataset in `folder`."""
    return folder / "text.jsonl", folder / "tokenizer", folder / f"{dataset}_text_document"


def _texts(path: Path) -> Iterator[str]:
    for line in read_lines(path):
        yield parse_json(path, line)["text"]


def _seconds(start: float) -> str:
    return f"{time.monotonic() - start:.1f} s"


def _fingerprints(folder: Path) -> dict[str, str]:
    """Return relative path -> SHA-256 of every file below `folder`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): sha256_of(p) for p in files}


def _load(folder: Path, dataset: str) -> PreparedData | None:
    """Return the dataset in `folder` if its stamp is for these inputs, and fits its files."""
    try:
        stamp = read_json_object(folder / STAMP)
        if stamp["inputs"] != _inputs(dataset):
            return None
        # Only the stamped files: Megatron adds a cache of shuffles in the index's folder.
        if any(sha256_of(folder / name) != digest for name, digest in stamp["files"].items()):
            return None
        counts = (stamp["documents"], stamp["tokens"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    text, words, prefix = layout(folder, dataset)
    size = tokenizer.DEFAULT_VOCAB_SIZE
    return PreparedData(dataset, text, words, prefix, size, *counts)
