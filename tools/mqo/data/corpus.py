"""A corpus on disk as chunks of documents: JSON lines, parquet or text, plain, .gz or .zst."""

import glob
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from mqo.errors import DataError, check_name
from mqo.untrusted import Limit, open_file

# The endings of a corpus's files in a folder; .gz or .zst may follow.
KINDS = {
    "wikipedia": (".parquet", ".jsonl", ".json"),
    "dolma": (".json", ".jsonl", ".parquet"),
    "jsonl": (".jsonl", ".json", ".parquet"),
    "text": (".txt", ".text", ".md"),
}
_PACKED = (".gz", ".zst")
CHUNK = 1 << 20  # bytes of JSON lines: some hundred documents, and small enough for any memory
_ROWS = 256  # of parquet in a chunk
_MOST = Limit.TEXT  # bytes of a document: packed ones may expand to a thousand times their size

_NO_TEXT = "without a text"
_KINDS_OF_FAULTS: Mapping[type[Exception], str] = {
    UnicodeDecodeError: "not UTF-8",
    KeyError: _NO_TEXT,
    TypeError: _NO_TEXT,  # JSON, but not an object
}

RawDocument = bytes | tuple[str | None, ...]


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents of a file: unparsed JSON lines, or the texts of the keys.

    `first` is the 1-based line of the first document. `position` is the number of bytes of the file
    on disk that were read up to the chunk.
    """

    first: int
    position: int
    rows: Sequence[RawDocument]


@dataclass(frozen=True)
class Fault:
    """The reason why a document cannot be used; `kind` is the same for all documents like it."""

    kind: str
    reason: str


def find(inputs: list[Path], kind: str) -> list[Path]:
    """Return the files of `inputs` (files, folders, glob patterns), sorted for each.

    Raises UnknownNameError for an unknown kind, DataError for an input without files.
    """
    check_name("kind of corpus", kind, KINDS)
    return [file for path in inputs for file in _files(path, kind)]


def _files(path: Path, kind: str) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(
            p for p in path.rglob("*") if p.is_file() and unpacked_name(p).suffix in KINDS[kind]
        )
    else:
        files = [p for name in sorted(glob.glob(str(path))) if (p := Path(name)).is_file()]  # noqa: PTH207
    if files:
        return files
    endings = ", ".join(KINDS[kind])
    raise DataError(
        f"No {kind} file was found at {path}",
        expected=f"a file, or a folder of files that end in {endings}, also with .gz or .zst",
    )


def unpacked_name(path: Path) -> Path:
    """Return the name of a file without .gz or .zst."""
    return Path(path.stem if path.suffix in _PACKED else path.name)


def read(path: Path, kind: str, keys: tuple[str, ...]) -> Iterator[Chunk]:
    """Yield the chunks of a file; DataError if it cannot be read to its end."""
    reader = _lines
    if kind == "text":
        reader = _whole
    elif path.suffix == ".parquet":
        reader = _parquet
    with _readable(path):
        yield from reader(path, keys)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except Exception as error:  # each library has errors of its own for a damaged file
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}: {error})",
            expected="a complete file, compressed as its name says",
            help="Fetch it again, or leave it out",
        ) from error


@contextmanager
def _unpacked(path: Path) -> Iterator[tuple[io.BufferedIOBase, io.BufferedIOBase]]:
    """Yield the content as a stream, and the file below it, whose position shows the progress."""
    with open_file(path, Limit.STREAM) as raw:
        if path.suffix == ".gz":
            import gzip

            yield gzip.GzipFile(fileobj=raw), raw
        elif path.suffix == ".zst":
            import pyarrow

            # Unlike zstandard's own reader, this one detects a truncated file.
            stream = pyarrow.CompressedInputStream(raw, "zstd")
            yield io.BufferedReader(stream, CHUNK), raw
        else:
            yield raw, raw


def start_of(path: Path, size: int) -> bytes:
    """Return the first bytes of an unpacked file; DataError if it cannot be unpacked."""
    with _readable(path), _unpacked(path) as (stream, _):
        return stream.read(size)


def _lines(path: Path, keys: tuple[str, ...]) -> Iterator[Chunk]:
    first = 1
    with _unpacked(path) as (stream, raw):
        while rows := _rows(path, first, stream):
            yield Chunk(first, raw.tell(), rows)
            first += len(rows)


def _rows(path: Path, first: int, stream: io.BufferedIOBase) -> list[RawDocument]:
    """Return the next lines, of CHUNK bytes or a little more; none at the end."""
    rows: list[RawDocument] = []
    size = 0
    while size < CHUNK and (line := stream.readline(_MOST)):
        if len(line) == _MOST:
            raise _too_long(f"Line {first + len(rows)} of {path}")
        rows.append(line)
        size += len(line)
    return rows


def _too_long(name: str) -> DataError:
    return DataError(
        f"{name} is longer than a document may be",
        expected=f"fewer than {_MOST:,} bytes, uncompressed",
        help="Split it into documents",
    )


def _whole(path: Path, keys: tuple[str, ...]) -> Iterator[Chunk]:
    with _unpacked(path) as (stream, raw):
        content = bytearray()
        while part := stream.read(CHUNK):
            content += part
            if len(content) >= _MOST:
                raise _too_long(str(path))
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = None
        yield Chunk(1, raw.tell(), [(text,)])


def _parquet(path: Path, keys: tuple[str, ...]) -> Iterator[Chunk]:
    import pyarrow.parquet

    size, first = path.stat().st_size, 1
    with pyarrow.parquet.ParquetFile(path) as file:
        names, total = file.schema_arrow.names, file.metadata.num_rows
        if not set(keys) <= set(names):
            raise DataError(f"{path} has the columns {', '.join(names)}", expected=", ".join(keys))
        for batch in file.iter_batches(_ROWS, columns=list(keys)):
            columns = [batch.column(key).to_pylist() for key in keys]
            rows: list[RawDocument] = list(zip(*columns, strict=True))
            yield Chunk(first, size * (first + len(rows) - 1) // total, rows)
            first += len(rows)


def documents(chunk: Chunk, keys: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...] | Fault]]:
    """Yield each document's line, and its texts under `keys` or the reason why it has none."""
    for line, row in enumerate(chunk.rows, chunk.first):
        if texts := _texts_of(row, keys):
            yield line, texts


def _texts_of(row: RawDocument, keys: tuple[str, ...]) -> tuple[str, ...] | Fault:
    """Return a document's texts, none for a blank line, or the reason why it has none."""
    if isinstance(row, tuple):
        texts = row
        return texts if _are_texts(texts) else Fault(_NO_TEXT, "no text")
    if row.isspace():
        return ()
    try:
        document = json.loads(row)
        texts = tuple(document[key] for key in keys)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        kind = _KINDS_OF_FAULTS.get(type(error), "not JSON")
        names = ", ".join(keys)
        return Fault(kind, f"no JSON object with {names} ({type(error).__name__}: {error})")
    if not _are_texts(texts):
        return Fault(_NO_TEXT, f"{', '.join(keys)} must be text")
    if b"\\ud" in row or b"\\uD" in row:
        return tuple(map(_whole_characters, texts))
    return texts


def _are_texts(values: tuple[str | None, ...]) -> TypeGuard[tuple[str, ...]]:
    return all(isinstance(value, str) for value in values)


def _whole_characters(text: str) -> str:
    """Replace half a surrogate pair, which JSON may spell but no tokenizer takes, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
