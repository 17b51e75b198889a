"""From a corpus to the pair: the very bytes, with any number of workers, and after any kill."""

import json
import os
import signal
import subprocess
import sys

import pytest
from mqo.data import corpus, encode, pair, pipeline
from mqo.data.meter import Meter
from mqo.data.pipeline import Job, State, index
from mqo.display import Display
from mqo.errors import DataError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of a few lines, saved every second one: a small corpus has many."""
    monkeypatch.setattr(corpus, "CHUNK", 500)
    monkeypatch.setattr(pipeline, "_SAVED_EVERY", 2)


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
        return Job(prefix=tmp_path / "out" / name, **given | rest)

    return job


@pytest.fixture
def said():
    return []


@pytest.fixture
def meter(said):
    return Meter(said.append, interval=0)


def _bytes(job, key="text"):
    names = [f"{job.prefix.name}_{key}_document{end}" for end in (".bin", ".idx")]
    return [job.prefix.with_name(name).read_bytes() for name in names]


@pytest.mark.parametrize("size", [400, 70_000], ids=["two bytes", "four bytes"])
@pytest.mark.parametrize("eod", [True, False])
def test_the_bytes_are_those_of_megatrons_builder(vendored, make, texts, meter, size, eod):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    encoder = encode.replace(make().encoder, vocab_size=size)
    job = make(encoder=encoder, eod=eod)
    index(job, 2, meter)
    theirs = job.prefix.with_name("theirs")
    builder = IndexedDatasetBuilder(f"{theirs}.bin", dtype=DType.optimal_dtype(size))
    for text in texts:
        if text:
            [ids] = encoder.slow.encode([text])
            document = [*ids.tolist(), 0] if eod else ids.tolist()
            builder.add_document(document, [len(document)])
    builder.finalize(f"{theirs}.idx")
    expected = [theirs.with_name(f"theirs{end}").read_bytes() for end in (".bin", ".idx")]
    assert _bytes(job) == expected
    assert len(expected[0]) > 10_000


@pytest.mark.parametrize("engine", ["tiktoken", "tokenizers"])
def test_workers_and_engines_change_no_byte(make, words, texts, meter, engine):
    one = make("one")
    state = index(one, 1, meter)
    assert state.documents == sum(map(bool, texts))
    assert state.skipped == len(texts) - state.documents > 0
    three = make("three", encoder=encode.load(words, engine))
    assert index(three, 3, meter) == state
    assert _bytes(three) == _bytes(one)
    names = {f"{name}_text_document{end}" for name in ("one", "three") for end in (".bin", ".idx")}
    assert {p.name for p in one.prefix.parent.iterdir()} == names  # and nothing is left


def test_each_key_has_its_pair(make, meter):
    both, title = make("both", keys=("text", "title")), make("title", keys=("title",))
    counts = index(both, 2, meter), index(title, 1, meter)
    assert _bytes(both, "title") == _bytes(title, "title")
    assert counts[0].documents == 2 * counts[1].documents


class Killed(BaseException):
    """Like a kill: nothing in the code under test handles it, nor saves anything."""


def _die_at(monkeypatch, step, calls):
    """Makes the given call of a method of Pairs the last one, and saves impossible after it."""
    left, whole, dead = calls, getattr(pair.Pairs, step), []

    def die(self, *arguments):
        nonlocal left
        left -= 1
        if left == 0 or dead:
            dead.append(1)
            raise Killed
        return whole(self, *arguments)

    monkeypatch.setattr(pair.Pairs, step, die)
    if step == "add":
        save = pair.Pairs.save
        monkeypatch.setattr(pair.Pairs, "save", lambda *a: die(*a) if dead else save(*a))


@pytest.mark.parametrize(
    ("step", "calls"),
    [("add", 1), ("add", 4), ("add", 25), ("save", 1), ("save", 3), ("finish", 1)],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(
    make, meter, said, monkeypatch, step, calls, workers
):
    whole, broken = make("whole"), make("broken")
    state = index(whole, 1, meter)
    with monkeypatch.context() as patch:
        _die_at(patch, step, calls)
        with pytest.raises(Killed):
            index(broken, workers, meter)
    assert not list(broken.prefix.parent.glob("broken_*"))
    said.clear()
    assert index(broken, workers, meter) == state
    assert _bytes(broken) == _bytes(whole)
    if (step, calls) in (("add", 25), ("save", 3), ("finish", 1)):
        assert any("Going on after" in line for line in said)


_DRIVER = """
import os, signal, sys
from pathlib import Path
from mqo.data import corpus, encode, pair, pipeline
from mqo.data.meter import Meter

corpus.CHUNK, pipeline._SAVED_EVERY = 500, 2
add, count = pair.Pairs.add, 0

def last(*arguments):
    global count
    count += 1
    if count == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    add(*arguments)

pair.Pairs.add = last
files, words, out = [Path(f) for f in sys.argv[3:]], Path(sys.argv[1]), Path(sys.argv[2])
job = pipeline.Job(tuple(files), "jsonl", ("text",), encode.load(words), out)
pipeline.index(job, 2, Meter(print))
"""


def test_a_real_kill_leaves_what_goes_on_and_no_worker(make, words, meter, said):
    whole, broken = make("whole"), make("broken")
    index(whole, 1, meter)
    command = [sys.executable, "-c", _DRIVER, words, broken.prefix, *broken.files]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    # Workers hold the pipes, too: that this call has returned says that they are gone.
    assert done.returncode == -signal.SIGKILL, done.stderr
    index(broken, 2, meter)
    assert any("Going on after" in line for line in said)
    assert _bytes(broken) == _bytes(whole)


def test_other_inputs_begin_anew(make, meter, said, monkeypatch):
    job = make()
    with monkeypatch.context() as patch:
        _die_at(patch, "finish", 1)
        with pytest.raises(Killed):
            index(job, 1, meter)
    path = job.files[0]
    path.write_text(path.read_text() * 2)
    state = index(job, 1, meter)
    assert not any("Going on" in line for line in said)
    again = make("again")
    assert index(again, 1, meter) == state
    assert _bytes(again) == _bytes(job)


def _spoil(job, count=1):
    path = job.files[1]
    lines = path.read_text().splitlines()
    lines[3:3] = ["{"] * count
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_reported_counted_and_left_out(make, meter, said, workers):
    whole, job = make("whole"), make()
    index(whole, 1, meter)
    _spoil(job)
    state = index(job, workers, meter)
    assert state.bad == 1
    assert any("b.jsonl:4: no JSON object with text" in line for line in said)
    assert said[-1] == "1 documents were unusable and left out"
    assert _bytes(job) == _bytes(whole)


def test_many_bad_lines_are_counted_and_the_first_are_shown(make, meter, said):
    job = make()
    _spoil(job, 50)
    assert index(job, 2, meter).bad == 50
    assert sum("b.jsonl:" in line for line in said) == 20


@pytest.mark.parametrize("workers", [1, 2])
def test_strict_stops_at_a_bad_line(make, meter, workers):
    job = make(strict=True)
    _spoil(job)
    with pytest.raises(DataError, match=r"b\.jsonl:4: no JSON object"):
        index(job, workers, meter)
    assert not list(job.prefix.parent.glob("*.idx"))


def test_a_corpus_without_text_is_refused_and_leaves_nothing(make, meter, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    job = make(files=(tmp_path / "a.jsonl",))
    with pytest.raises(DataError, match="No document with any text"):
        index(job, 1, meter)
    assert list(job.prefix.parent.iterdir()) == []


def test_a_tokenizer_without_an_end_of_document_is_refused(make, meter):
    encoder = encode.replace(make().encoder, eod=None)
    with pytest.raises(DataError, match="no token that ends a document"):
        index(make(encoder=encoder), 1, meter)
    index(make(encoder=encoder, eod=False), 1, meter)


def test_a_second_process_is_refused(make, meter):
    job = make()
    refused = pytest.raises(DataError, match=r"Another process is writing .*mine")
    with pair.Pairs(job.prefix, job.keys, "of the first", 2), refused:
        index(job, 1, meter)
    index(job, 1, meter)


def _killed(texts):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_reported(make, meter):
    encoder = encode.replace(make().encoder, encode=_killed, slow=None)
    with pytest.raises(DataError, match=r"worker process was killed.*fewer --workers"):
        index(make(encoder=encoder), 2, meter)


def test_an_older_index_never_stands_beside_newer_data(make, meter, monkeypatch):
    job = make()
    index(job, 1, meter)
    before = _bytes(job)
    with monkeypatch.context() as patch:
        _die_at(patch, "finish", 1)
        with pytest.raises(Killed):
            index(make(eod=False), 1, meter)
    assert _bytes(job) == before  # till the new pair is whole
    assert index(job, 1, meter) != State()


def test_a_log_has_a_line_a_minute_with_the_speed_of_the_last_one(said):
    seconds = iter(range(0, 100_000, 30))
    meter = Meter(Display(said.append, now=lambda: next(seconds)), now=lambda: next(seconds))
    with meter.started(1000, 0, 0):
        for done in range(0, 1000, 100):
            meter.show(done, done // 10, done * 10_000)
    assert 3 <= len(said) <= 10
    assert all(line.endswith(" left") and len(line) <= 80 for line in said[1:])
    assert " % " in said[-1] and " documents" in said[-1]


def test_lines_tell_the_speed_and_the_time_that_is_left(make, said):
    index(make(), 1, Meter(said.append, interval=20))
    assert sum("M tokens" in line and line.endswith(" left") for line in said) >= 3
