"""From a corpus to the pair: the ids of every document, whole or not at all."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from filelock import FileLock
from mqo.data import corpus, encode, pipeline
from mqo.data.pipeline import Counts, IndexJob, index
from mqo.errors import DataError

datasets = pytest.importorskip("megatron.core.datasets.indexed_dataset")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of a few lines: a small corpus has many."""
    monkeypatch.setattr(corpus, "CHUNK", 500)


@pytest.fixture
def texts(prose):
    """Documents, some of them empty."""
    return ["".join(prose[n : n + n % 5]) for n in range(0, 400, 3)] + prose[-3:]


@pytest.fixture
def make(tmp_path, texts, words):
    """A function that makes a job on two files of the documents."""
    half = len(texts) // 2
    for name, some in (("a.jsonl", texts[:half]), ("b.jsonl", texts[half:])):
        lines = [json.dumps({"text": text, "title": text[:9]}) for text in some]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    files = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")

    def job(name="mine", **rest):
        given = {"files": files, "kind": "jsonl", "keys": ("text",), "encoder": encode.load(words)}
        return IndexJob(prefix=tmp_path / "out" / name, **given | rest)

    return job


@pytest.fixture
def said():
    return []


def _bytes(job, key="text"):
    names = [f"{job.prefix.name}_{key}_document{end}" for end in (".bin", ".idx")]
    return [job.prefix.with_name(name).read_bytes() for name in names]


@pytest.mark.parametrize(("size", "kind"), [(400, np.uint16), (70_000, np.int32)])
@pytest.mark.parametrize("eod", [True, False])
def test_megatrons_reader_gives_each_documents_ids(make, texts, said, size, kind, eod):
    job = make(encoder=replace(make().encoder, vocab_size=size), eod=eod)
    counts = index(job, said.append)
    read = datasets.IndexedDataset(str(job.prefix.with_name("mine_text_document")))
    found = [read[n].tolist() for n in range(len(read))]
    plain = [job.encoder.tokenizer.encode(text).ids for text in texts if text]
    assert found == [[*ids, 0] if eod else ids for ids in plain]
    assert read[0].dtype == kind
    assert read.document_indices.tolist() == list(range(len(plain) + 1))
    skipped = len(texts) - len(plain)
    assert counts == Counts(len(plain), sum(map(len, found)), skipped, bad=0)
    assert skipped > 0


def test_only_the_pair_is_left(make, said):
    job = make()
    index(job, said.append)
    names = {f"mine_text_document{end}" for end in (".bin", ".idx")}
    assert {p.name for p in job.prefix.parent.iterdir()} == names


def test_each_key_has_its_pair(make, said):
    both, title = make("both", keys=("text", "title")), make("title", keys=("title",))
    counts = index(both, said.append), index(title, said.append)
    assert _bytes(both, "title") == _bytes(title, "title")
    assert counts[0].documents == 2 * counts[1].documents


_DRIVER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from mqo.data import corpus, encode, pipeline

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

place = sys.argv.pop(1)
corpus.CHUNK = 500
if place == "writing":
    add, count = pipeline._add, iter(range(100))
    pipeline._add = lambda *a: add(*a) if next(count) < 12 else die()
else:
    Path.replace = die
files, words, out = [Path(f) for f in sys.argv[3:]], Path(sys.argv[1]), Path(sys.argv[2])
pipeline.index(pipeline.IndexJob(tuple(files), "jsonl", ("text",), encode.load(words), out), print)
"""


@pytest.mark.parametrize("place", ["writing", "renaming"])
def test_a_kill_leaves_no_pair_and_the_next_command_makes_it(vendored, make, words, said, place):
    whole, broken = make("whole"), make("broken")
    index(whole, said.append)
    command = [sys.executable, "-c", _DRIVER, vendored.root, place, words, broken.prefix]
    done = subprocess.run(
        list(map(str, [*command, *broken.files])), capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(broken.prefix.parent.glob("broken_*"))
    index(broken, said.append)
    assert _bytes(broken) == _bytes(whole)
    assert not broken.prefix.with_name("broken.partial").exists()


def _spoil(job, count=1):
    path = job.files[1]
    lines = path.read_text().splitlines()
    lines[3:3] = ["{"] * count
    path.write_text("\n".join(lines) + "\n")


def test_a_bad_line_is_reported_counted_and_left_out(make, said):
    whole, job = make("whole"), make()
    index(whole, said.append)
    _spoil(job)
    assert index(job, said.append).bad == 1
    assert any("b.jsonl:4: no JSON object with text" in line for line in said)
    assert said[-1] == "1 documents were unusable and left out"
    assert _bytes(job) == _bytes(whole)


def test_many_bad_lines_are_counted_and_the_first_are_shown(make, said):
    job = make()
    _spoil(job, 50)
    assert index(job, said.append).bad == 50
    assert sum("b.jsonl:" in line for line in said) == 20


def test_strict_stops_at_a_bad_line_and_leaves_nothing(make, said):
    job = make(strict=True)
    _spoil(job)
    with pytest.raises(DataError, match=r"b\.jsonl:4: .*JSON"):
        index(job, said.append)
    assert list(job.prefix.parent.iterdir()) == []


def test_a_corpus_without_text_is_refused_and_leaves_nothing(make, said, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    job = make(files=(tmp_path / "a.jsonl",))
    with pytest.raises(DataError, match=r"a\.jsonl\. Expected: documents with text"):
        index(job, said.append)
    assert list(job.prefix.parent.iterdir()) == []


def test_a_tokenizer_without_an_end_of_document_is_refused(make, said):
    encoder = replace(make().encoder, eod=None)
    with pytest.raises(DataError, match=r"eos_token in tokenizer_config\.json"):
        index(make(encoder=encoder), said.append)
    index(make(encoder=encoder, eod=False), said.append)


def test_a_second_process_is_refused(make, said):
    job = make()
    folder = job.prefix.with_name("mine.partial")
    folder.mkdir(parents=True)
    refused = pytest.raises(DataError, match=r"Another process .*mine")
    with FileLock(folder / "lock"), refused:
        index(job, said.append)
    index(job, said.append)


def test_an_older_pair_stays_until_the_new_one_is_whole(make, said, monkeypatch):
    job = make()
    index(job, said.append)
    before = _bytes(job)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_add", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            index(make(eod=False), said.append)
    assert _bytes(job) == before
    index(make(eod=False), said.append)
    assert _bytes(job) != before


def test_the_caller_sees_how_far_it_is(make, said):
    job, seen = make(), []
    total = sum(file.stat().st_size for file in job.files)
    counts = index(job, said.append, lambda *advance: seen.append(advance[:2]))
    assert seen == sorted(seen) and len(seen) > 10
    assert seen[-1] == (total, total)
    assert counts.documents > 0
