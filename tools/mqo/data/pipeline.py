"""A corpus to Megatron's pairs: read here, parsed and encoded in worker processes, written here.

Chunks are written in the order of the corpus, so that the same corpus gives the same bytes with any
number of workers. What was written is saved now and then: a run that was killed goes on there.
"""

import ctypes
import hashlib
import json
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path

from mqo.data import corpus
from mqo.data.corpus import Bad, Chunk
from mqo.data.encode import Encoder, agreed
from mqo.data.meter import Meter
from mqo.data.pair import Pairs, State, id_type
from mqo.errors import DataError, full_disk_of
from mqo.process import STOPS, held

_SAVED_EVERY = 64  # chunks: seconds of work
_AHEAD = 4  # chunks a worker that are read and not yet written
_MOST_WORKERS = 1024  # each is forked at once, whatever there is to do
_SHOWN = 20  # bad documents that are reported one by one
_FORMAT = 1  # raised when the same inputs give other chunks or files than before


@dataclass(frozen=True)
class Job:
    """What is indexed, and how: `keys` name the texts, one pair of files each at `prefix`.

    `eod` ends each document with the encoder's end-of-document id. `strict` stops at a bad
    document.
    """

    files: tuple[Path, ...]
    kind: str
    keys: tuple[str, ...]
    encoder: Encoder
    prefix: Path
    eod: bool = True
    strict: bool = False

    def digest(self) -> str:
        """Return the digest of all that the output depends on; files by name, size and time."""
        files = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in self.files]
        options = [self.kind, self.keys, self.eod, corpus.CHUNK, _FORMAT]
        tokenizer = [self.encoder.digest, self.encoder.engine]
        return hashlib.sha256(json.dumps([files, options, tokenizer]).encode()).hexdigest()


@dataclass(frozen=True)
class Part:
    """A chunk encoded: for each key the ids and the lengths, as bytes; and what was left out."""

    file: int
    number: int
    position: int
    pairs: tuple[tuple[bytes, bytes], ...]
    skipped: int
    bad: list[Bad]


def index(job: Job, workers: int, meter: Meter) -> State:
    """Index the corpus of `job`, and return the counts, summed over the keys.

    Raises DataError for a corpus without any text, a file that cannot be read, a bad document when
    strict, an encoder without an end of document, too many workers, and when another process writes
    there.
    """
    if not job.prefix.name:
        raise DataError(f"{job.prefix} names no file", expected="the prefix of the files to write")
    if not 1 <= workers <= _MOST_WORKERS:
        raise DataError(f"{workers} workers were asked for", expected=f"1 to {_MOST_WORKERS}")
    if job.eod and job.encoder.eod is None:
        raise DataError(
            "The tokenizer names no token that ends a document",
            expected="an eos_token in tokenizer_config.json that the vocabulary holds",
        )
    job = _tried(job)
    meter.say(f"Encoding with {job.encoder.engine}, {workers} workers")
    width = id_type(job.encoder.vocab_size)().itemsize
    with (
        full_disk_of(job.prefix.parent),
        Pairs(job.prefix, job.keys, job.digest(), width) as pairs,
    ):
        if pairs.state.documents:
            meter.say(f"Going on after {pairs.state.documents:,} documents of an earlier run")
        state = _filled(pairs, job, workers, meter)
        if not state.documents:
            pairs.discard()
            raise DataError(
                f"No document with any text in {job.files[0]}" + (" ..." if job.files[1:] else ""),
                expected=f"documents with {', '.join(job.keys)}",
            )
        pairs.finish()
    if state.bad:
        meter.say(f"{state.bad:,} documents were unusable and left out")
    return state


def _tried(job: Job) -> Job:
    """Return the job with the engine that encodes this corpus as the tokenizer's library does."""
    first = next(chain.from_iterable(_chunks(job, State())), None)
    if first is None:
        return job
    good, _ = corpus.documents(first, job.keys)
    return replace(job, encoder=agreed(job.encoder, [text for texts in good for text in texts]))


def _filled(pairs: Pairs, job: Job, workers: int, meter: Meter) -> State:
    """Add what is not yet in `pairs`; keep what was written, whatever ends it."""
    state = saved = pairs.state
    sizes = [file.stat().st_size for file in job.files]
    total, before = sum(sizes), sum(sizes[: state.file])
    try:
        with meter.started(total, state.tokens, before), _encoded(job, state, workers) as parts:
            for part in parts:
                _report(job, part, state.bad, meter)
                state = _added(pairs, job, part, state)
                done = sum(sizes[: part.file]) + part.position
                meter.show(done, state.documents, state.tokens)
                if part.number % _SAVED_EVERY == _SAVED_EVERY - 1:
                    pairs.save(saved := state)
    except BaseException:
        if state != saved:
            pairs.save(state)
        raise
    return state


def _report(job: Job, part: Part, before: int, meter: Meter) -> None:
    for number, bad in enumerate(part.bad, before):
        text = f"{job.files[part.file]}:{bad.line}: {bad.reason}"
        if job.strict:
            raise DataError(text, help="Correct the line, or leave out --strict to skip such lines")
        if number <= _SHOWN:
            meter.say(text if number < _SHOWN else "More are counted, not shown")


def _added(pairs: Pairs, job: Job, part: Part, state: State) -> State:
    documents = tokens = 0
    width = id_type(job.encoder.vocab_size)().itemsize
    for key, (ids, lengths) in zip(job.keys, part.pairs, strict=True):
        pairs.add(key, ids, lengths)
        documents += len(lengths) // 4
        tokens += len(ids) // width
    return State(
        file=part.file,
        chunk=part.number + 1,
        documents=state.documents + documents,
        tokens=state.tokens + tokens,
        skipped=state.skipped + part.skipped,
        bad=state.bad + len(part.bad),
    )


def _chunks(job: Job, state: State) -> Iterator[Iterator[Chunk]]:
    """Yield, for each file that is left, its chunks after those that `state` counts."""
    for number in range(state.file, len(job.files)):
        chunks = corpus.read(number, job.files[number], job.kind, job.keys)
        yield islice(chunks, state.chunk if number == state.file else 0, None)


# -- workers --------------------------------------------------------------------------------------


@contextmanager
def _encoded(job: Job, state: State, workers: int) -> Iterator[Iterator[Part]]:
    """Yield the parts in order. Forked workers share the vocabulary, and start in no time."""
    # A tokenizer's own threads would be lost in a fork, and compete with the workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chunks = chain.from_iterable(_chunks(job, state))
    if workers <= 1:
        yield (_encode(job, chunk) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("fork"), _start, (job, os.getpid()))
    try:
        yield _ordered(pool, chunks, workers * _AHEAD)
    except BrokenProcessPool as error:
        raise DataError(
            "A worker process was killed, probably for lack of memory",
            help="Repeat the command, which goes on from here, with fewer --workers",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _ordered(pool: ProcessPoolExecutor, chunks: Iterator[Chunk], ahead: int) -> Iterator[Part]:
    waiting: deque[Future[Part]] = deque()
    for chunk in chunks:
        with held():  # it may fork, and Python loses what a signal raises meanwhile
            waiting.append(pool.submit(_work, chunk))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_job: Job  # a worker's, from its start on


def _start(job: Job, parent: int) -> None:
    global _job
    _job = job
    for s in STOPS:  # the parent stops the work, and in order
        signal.signal(s, signal.SIG_IGN)
    # A worker whose parent was killed would wait for work for ever. 1 is PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _work(chunk: Chunk) -> Part:
    return _encode(_job, chunk)


def _encode(job: Job, chunk: Chunk) -> Part:
    good, bad = corpus.documents(chunk, job.keys)
    pairs, skipped = [], 0
    for place in range(len(job.keys)):
        texts = [texts[place] for texts in good if texts[place]]
        ids, lengths = _joined(job, texts)
        pairs.append((ids, lengths))
        # A sequence of length zero, or one of a lone EOD, teaches nothing.
        skipped += len(good) - len(lengths) // 4
    return Part(chunk.file, chunk.number, chunk.position, tuple(pairs), skipped, bad)


def _joined(job: Job, texts: list[str]) -> tuple[bytes, bytes]:
    """Return the ids of all texts, each ended by EOD if so asked, and how many each has."""
    import numpy as np

    encoder = job.encoder
    arrays = [ids for ids in encoder.encode(texts) if len(ids)] if texts else []
    lengths = np.array([len(ids) + job.eod for ids in arrays], np.int32)
    if job.eod:
        end = np.array([encoder.eod], np.uint32)
        arrays = [part for ids in arrays for part in (ids, end)]
    ids = np.concatenate(arrays) if arrays else np.array([], np.uint32)
    return ids.astype(id_type(encoder.vocab_size)).tobytes(), lengths.tobytes()
