"""Prepare text files of the user for training, once: count bad records, tokenize, index."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mqo.data import cached, corpus, sample, tokenizer
from mqo.data.cached import BadRecords
from mqo.data.prepare import index_text, layout
from mqo.display import Say
from mqo.errors import DataError, MissingError
from mqo.project import Project
from mqo.untrusted import Limit, check_file, reading, sha256_of

# As in prepare.py: increase it if a change of the steps changes their output.
_RECIPE = 1
_KEYS = ("text",)
_JSON, _PLAIN = "jsonl", "text"  # kinds of mqo.data.corpus
# A plain text is cut into about this many documents, so that some can be held out.
_PARTS = 100
_PART = 1_000  # bytes of a document of a plain text, at least
_START = 1 << 16  # bytes that are searched for NUL
Bad = dict[str, BadRecords]  # the records that are left out, by kind
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")  # what encoding depends on


class TextFiles(BaseModel):
    """Text files of the user, by absolute path with their SHA-256, under the dataset's name.

    `tokenizer` is the digest of the user's tokenizer; None for one that is trained on the text.
    With `strict`, a bad record is an error.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    files: dict[str, str]
    tokenizer: str | None = None
    strict: bool = False

    @property
    def inputs(self) -> dict[str, object]:
        """Return what the index depends on; the names of the files are not part of it."""
        kinds = [[_kind(Path(path)), digest] for path, digest in self.files.items()]
        words = self.tokenizer or f"trained, {tokenizer.DEFAULT_VOCAB_SIZE} entries"
        return {"text": kinds, "tokenizer": words, "recipe": _RECIPE}

    def folder(self, project: Project) -> Path:
        """Return the folder of the index."""
        key = hashlib.sha256(json.dumps(self.inputs).encode()).hexdigest()[:16]
        return project.own_data / "text" / f"{self.name}-{key}"

    def paths(self, project: Project) -> tuple[Path, Path]:
        """Return the folder of the tokenizer that is trained, and the prefix of the index."""
        return layout(self.folder(project), self.name)[1:]

    def contents(self, project: Project) -> cached.Contents | None:
        """Return what the index holds; None if it is not there."""
        return cached.load(self.folder(project), self.inputs)


def text_files(
    files: Sequence[Path], name: str, given: Path | None, *, strict: bool = False
) -> TextFiles:
    """Return the identity of text files and of the user's tokenizer, if one is `given`.

    Raises:
        DataError: a file is missing, empty, given twice, or does not hold text; or the tokenizer is
            not a folder that trainings read.
    """
    digests: dict[str, str] = {}
    for file in files:
        _check_file(file)
        path = str(file.resolve())
        if path in digests:
            raise DataError(f"The text {file} was given twice", expected="each file once")
        digests[path] = sha256_of(path)
    words = None if given is None else _digest(given)
    return TextFiles(name=name, files=digests, tokenizer=words, strict=strict)


def stem(file: Path) -> str:
    """Return a file's name without its endings, such as .jsonl.gz."""
    return corpus.unpacked_name(file).stem


def _kind(file: Path) -> str | None:
    ending = corpus.unpacked_name(file).suffix
    return next((kind for kind in (_JSON, _PLAIN) if ending in corpus.KINDS[kind]), None)


def _check_file(file: Path) -> None:
    if file.is_dir():
        raise DataError(
            f"The text {file} is a folder", expected="files", help=f"Name its files: {file}/*"
        )
    if not file.exists():
        raise MissingError(
            f"The text {file} does not exist",
            expected="a file",
            help="Arguments such as CHECKPOINT come before --text, which takes all words after it",
        )
    if _kind(file) is None:
        endings = ", ".join([*corpus.KINDS[_JSON], *corpus.KINDS[_PLAIN]])
        raise DataError(
            f"The ending of the text {file} does not say what it holds",
            expected=f"a name that ends in {endings}, also with .gz or .zst",
        )
    with reading(DataError):
        check_file(file, Limit.STREAM)
    if not file.stat().st_size:
        raise DataError(f"The text {file} is empty", expected="a file with text")
    if file.suffix != ".parquet" and b"\0" in corpus.start_of(file, _START):
        raise DataError(
            f"The text {file} holds NUL bytes, so it is binary or not UTF-8",
            expected="text in UTF-8",
        )


def _digest(folder: Path) -> str:
    """Return the digest of the files of a tokenizer's folder that encoding depends on."""
    if not folder.exists():
        raise MissingError(
            f"The tokenizer {folder} does not exist",
            expected="a folder with tokenizer.json, as saved by transformers",
        )
    with reading(DataError):
        digests = [sha256_of(folder / name) for name in _TOKENIZER]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


# -- reading ---------------------------------------------------------------------------------------


def _count(bad: Bad, kind: str, file: Path, line: int) -> None:
    row = bad.get(kind) or BadRecords(kind=kind, count=0, file=file.name, line=line)
    bad[kind] = row.model_copy(update={"count": row.count + 1})


def bad_line(bad: Sequence[BadRecords]) -> str:
    """Return a clause that counts the bad records, with the first line of each kind."""
    total = sum(row.count for row in bad)
    kinds = (f"{row.count:,} {row.kind} (first: {row.file}:{row.line})" for row in bad)
    return f"{total:,} {'record' if total == 1 else 'records'} left out: {', '.join(kinds)}"


def documents(file: Path, bad: Bad) -> Iterator[str]:
    """Yield the documents of a file; add the records that have no text to `bad`."""
    return (_records if _kind(file) == _JSON else _parts)(file, bad)


def _records(file: Path, bad: Bad) -> Iterator[str]:
    for chunk in corpus.read(file, _JSON, _KEYS):
        for line, texts in corpus.documents(chunk, _KEYS):
            if isinstance(texts, corpus.Fault):
                _count(bad, texts.kind, file, line)
            elif texts[0].strip():
                yield texts[0]
            else:
                _count(bad, "empty", file, line)


def _parts(file: Path, bad: Bad) -> Iterator[str]:
    """Yield the parts of a plain text, cut at empty lines where there are some."""
    least = max(_PART, file.stat().st_size // _PARTS)
    lines: list[bytes] = []
    first, size = 1, 0
    for chunk in corpus.read(file, _JSON, ()):
        for row in chunk.rows:
            assert isinstance(row, bytes)  # as JSON lines are read
            lines.append(row)
            size += len(row)
            if size >= 2 * least or (size >= least and row.isspace()):
                yield from _part(file, first, lines, bad)
                first, size, lines = first + len(lines), 0, []
    yield from _part(file, first, lines, bad)


def _part(file: Path, first: int, lines: Sequence[bytes], bad: Bad) -> Iterator[str]:
    content = b"".join(lines)
    try:
        text = content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        _count(bad, "not UTF-8", file, first + content.count(b"\n", 0, error.start))
        return
    if text.strip():
        yield text


# -- preparing -------------------------------------------------------------------------------------


def prepare_text(
    project: Project, text: TextFiles, given: Path | None, *, report: Say
) -> cached.Contents:
    """Index text files with the user's tokenizer `given`, or one that is trained on them.

    Does nothing if the index is there. `report` gets one line per step.

    Raises:
        DataError: the tokenizer or, without an index, a file has changed; a record is bad if
            strict; or there are fewer than two documents.
    """
    if given is not None and _digest(given) != text.tokenizer:
        raise _changed(given)
    build = partial(_build, text, given, report)
    contents = cached.ready(text.folder(project), text.inputs, build, report)
    _check_strict(text, contents.bad)
    return contents


def _build(text: TextFiles, given: Path | None, report: Say, folder: Path) -> cached.Contents:
    lines, files = layout(folder, text.name)[0], [*map(Path, text.files)]
    bad: Bad = {}
    count = sample.write_jsonl(({"text": t} for f in files for t in documents(f, bad)), lines)
    for file in files:
        with reading(DataError):
            if sha256_of(file) != text.files[str(file)]:
                raise _changed(file)
    rows = tuple(bad.values())
    _check_documents(text, count, rows)
    contents = index_text(folder, text.name, report, given, os.cpu_count() or 1)
    lines.unlink()  # training reads the index
    return contents.model_copy(update={"bad": rows})


def survey(text: TextFiles) -> tuple[int, tuple[BadRecords, ...]]:
    """Return the number of documents and the bad records, without an index.

    Raises what `prepare_text` raises for them.
    """
    bad: Bad = {}
    count = sum(1 for file in text.files for _ in documents(Path(file), bad))
    rows = tuple(bad.values())
    _check_documents(text, count, rows)
    return count, rows


def _check_documents(text: TextFiles, count: int, bad: Sequence[BadRecords]) -> None:
    _check_strict(text, bad)
    if count < 2:
        left_out = f"; {bad_line(bad)}" if bad else ""
        raise DataError(
            f"There {'is 1 document' if count == 1 else 'are no documents'} in "
            f"{' and '.join(text.files)}{left_out}",
            expected="two documents or more, one of them for validation: JSON lines with a key "
            f"'text', or plain text of more than {_PART:,} bytes, in lines",
        )


def _check_strict(text: TextFiles, bad: Sequence[BadRecords]) -> None:
    if text.strict and bad:
        raise DataError(
            bad_line(bad).replace(" left out", " cannot be used"),
            expected="only records with text in UTF-8, since --strict was given",
            help="Correct the files, or leave out --strict to skip these records",
        )


def _changed(path: Path) -> DataError:
    return DataError(
        f"{path} has changed since the run was planned",
        expected="the content that the run's configuration records",
        help="Restore it, or start a new run",
    )
