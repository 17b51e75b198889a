"""Prepare a named dataset for training, once: fetch, clean, train a tokenizer, index."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mqo.data import cached, debian_docs, encode, mix, sample, tokenizer
from mqo.data.preprocess import build_index
from mqo.display import Say
from mqo.errors import check_name
from mqo.project import Project
from mqo.untrusted import parse_json, read_lines

DATASETS = (debian_docs.NAME, "dolma", "wikipedia")

# Increase it if a change of the steps below changes their output, so that older data is made again.
# A hash of their source would do that for every new comment, and change the data within a series of
# runs that are to be compared.
_RECIPE = 1


def _inputs(dataset: str) -> dict[str, str | int]:
    """Return what the outputs depend on; the stamp records it.

    The optional sources of dolma that the machine could fetch are not among them, so that existing
    data stays valid on a machine without a network.
    """
    size = tokenizer.DEFAULT_VOCAB_SIZE
    source = debian_docs.digest() if dataset == debian_docs.NAME else sample.SHA256
    made_of = {"dataset": dataset, "source_sha256": source}
    return made_of | {"vocab_size": size, "recipe": _RECIPE}


def prepare(project: Project, dataset: str, *, report: Say) -> tuple[Path, cached.Contents]:
    """Prepare `dataset`, and return its folder and contents; do nothing if it is ready.

    It is in `project.data`, or in `project.own_data` if the former lacks it. `report` gets one line
    per step. Raises UnknownNameError for an unknown dataset, and DataError if a step fails.
    """
    check_name("dataset", dataset, DATASETS)
    inputs, folder = _inputs(dataset), project.data / dataset
    contents = cached.load(folder, inputs)
    if contents is None:
        folder = project.own_data / dataset
        build = partial(_run_steps, project, dataset, report)
        contents = cached.ready(folder, inputs, build, report)
    return folder, contents


def _run_steps(project: Project, dataset: str, report: Say, folder: Path) -> cached.Contents:
    (text, _, prefix), start = layout(folder, dataset), time.monotonic()
    documents: Iterable[sample.Article | mix.Document]
    if dataset == "dolma":
        documents = mix.documents(project.cache, report)
    elif dataset == debian_docs.NAME:
        documents = debian_docs.documents(project.cache, folder / "licenses", report)
    else:
        documents = sample.articles(sample.fetch(project.cache, report))
    count = sample.write_jsonl(map(asdict, documents), text)
    megabytes = text.stat().st_size / 1e6
    report(f"Cleaned {count} documents, {megabytes:.2f} MB, {_seconds(start)}")
    contents = index_text(folder, dataset, report)
    if dataset == debian_docs.NAME:
        debian_docs.write_card(folder / "README.md", text, prefix)
    return contents


def index_text(
    folder: Path, name: str, report: Say, given: Path | None = None, workers: int = 1
) -> cached.Contents:
    """Index the text in `folder`, with a tokenizer that is trained on it if none is given."""
    text, words, _ = layout(folder, name)
    if given is not None:
        words, size = given, encode.load(given).vocab_size
    else:
        start = time.monotonic()
        size = tokenizer.train(_texts(text), words, tokenizer.DEFAULT_VOCAB_SIZE)
        report(f"Trained a tokenizer of {size} entries, {_seconds(start)}")

    start = time.monotonic()
    options: dict[str, Any] = {"workers": workers, "strict": True, "report": report}
    counts = build_index("jsonl", [text], words, folder / name, **options)
    report(f"Indexed {counts.documents} documents, {counts.tokens} tokens, {_seconds(start)}")
    return cached.Contents(documents=counts.documents, tokens=counts.tokens, vocab_size=size)


def layout(folder: Path, dataset: str) -> tuple[Path, Path, Path]:
    """Return the text, the tokenizer's folder and the index's prefix of a dataset in `folder`."""
    return folder / "text.jsonl", folder / "tokenizer", folder / f"{dataset}_text_document"


def _texts(path: Path) -> Iterator[str]:
    for line in read_lines(path):
        yield parse_json(path, line)["text"]


def _seconds(start: float) -> str:
    return f"{time.monotonic() - start:.1f} s"
