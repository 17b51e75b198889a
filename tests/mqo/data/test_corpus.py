"""Reading a corpus: which files, which documents, and what is said of bad ones."""

import gzip
import json
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
from mqo.data import corpus
from mqo.errors import DataError, UnknownNameError

_TEXTS = ["The miller weighs the flour.", "", "The baker pays \u2014 in bread."]
_LINES = "".join(json.dumps({"text": text, "id": "1"}) + "\n" for text in _TEXTS).encode()


def _zstd(content):
    return pyarrow.compress(content, "zstd", asbytes=True)


def _read(path, kind="jsonl", keys=("text",)):
    """All documents of a file, and (line, reason) of the bad ones."""
    good, bad = [], []
    for chunk in corpus.read(path, kind, keys):
        for line, texts in corpus.documents(chunk, keys):
            if isinstance(texts, corpus.Fault):
                bad.append((line, texts.reason))
            else:
                good.append(texts)
    return good, bad


def _parquet(path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.json.gz", gzip.compress),
        ("a.jsonl.zst", _zstd),
        # As `cat` joins them.
        ("b.json.gz", lambda lines: gzip.compress(lines[:40]) + gzip.compress(lines[40:])),
        ("b.jsonl.zst", lambda lines: _zstd(lines[:9]) + _zstd(lines[9:])),
    ],
)
def test_packed_lines_read_as_plain_ones(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(_LINES))
    assert _read(tmp_path / name) == ([(text,) for text in _TEXTS], [])


def test_parquet_gives_its_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_ROWS", 2)
    path = _parquet(tmp_path / "a.parquet", {"id": ["1", "2", "3"], "text": [*_TEXTS[:2], None]})
    assert _read(path) == ([(text,) for text in _TEXTS[:2]], [(3, "no text")])
    assert _read(path, keys=("text", "id"))[0][0] == (_TEXTS[0], "1")


def test_a_column_that_is_missing_is_named_with_those_that_are_there(tmp_path):
    path = _parquet(tmp_path / "a.parquet", {"title": ["Mill"], "body": ["It turns."]})
    with pytest.raises(DataError, match=r"a\.parquet.* title, body.*: text"):
        _read(path)


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    assert _read(tmp_path / "a.txt", "text") == ([("One.\n\nTwo.\n",)], [])
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    assert _read(tmp_path / "b.txt", "text") == ([], [(1, "no text")])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b'{"title": "x"}', "KeyError"),
        (b'{"text": 3}', "must be text"),
        (b'{"text": "\xff"}', "UnicodeDecodeError"),
        (b"[" * 100_000, "RecursionError"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine, too"}')
    good, [(number, words)] = _read(path)
    assert good == [("fine",), ("fine, too",)]
    assert number == 3
    assert reason in words


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "bread \\ud83c, and \\ud83c\\udf5e"}')
    assert _read(path) == ([("bread \ufffd, and \U0001f35e",)], [])


def test_chunks_are_whole_lines_with_their_first_one_and_the_position(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 60)
    path = tmp_path / "a.jsonl"
    path.write_bytes(_LINES * 4)
    chunks = list(corpus.read(path, "jsonl", ("text",)))
    assert len(chunks) > 3
    firsts = [1]
    for chunk in chunks:
        firsts.append(firsts[-1] + len(chunk.rows))
    assert [c.first for c in chunks] == firsts[:-1]
    assert b"".join(row for c in chunks for row in c.rows) == path.read_bytes()
    assert chunks[-1].position == path.stat().st_size


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("a.jsonl.gz", gzip.compress(_LINES * 1000)),
        ("a.jsonl.zst", _zstd(_LINES * 1000)),
        ("a.parquet", b"PAR1 and no more than that"),
    ],
)
def test_a_file_that_was_cut_off_is_named(tmp_path, name, whole):
    (tmp_path / name).write_bytes(whole[:-9])
    with pytest.raises(DataError, match=rf"{name} cannot be read"):
        _read(tmp_path / name)


@pytest.mark.parametrize(("ending", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", _zstd)])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_document_without_end_is_refused_before_it_is_in_memory(
    tmp_path, monkeypatch, kind, ending, pack
):
    monkeypatch.setattr(corpus, "_MOST", 1 << 18)
    monkeypatch.setattr(corpus, "CHUNK", 1 << 16)
    path = tmp_path / f"a.{'txt' if kind == 'text' else kind}{ending}"
    path.write_bytes(pack(bytes(1 << 25)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"{1 << 18:,} bytes"):
            _read(path, kind)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_a_folder_gives_the_files_of_its_kind_in_order(tmp_path):
    for name in ("b/2.json.gz", "b/1.jsonl.zst", "a.jsonl", "notes.txt", "c.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [p.relative_to(tmp_path).as_posix() for p in corpus.find([tmp_path], "dolma")]
    assert found == ["a.jsonl", "b/1.jsonl.zst", "b/2.json.gz"]
    assert corpus.find([tmp_path], "text") == [tmp_path / "notes.txt"]
    assert len(corpus.find([tmp_path / "b" / "*", tmp_path / "a.jsonl"], "jsonl")) == 3


def test_an_input_without_a_file_names_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"wikipedia .*\.parquet"):
        corpus.find([tmp_path], "wikipedia")
    with pytest.raises(UnknownNameError, match=r"'c4'.*dolma, jsonl, text, wikipedia"):
        corpus.find([tmp_path], "c4")
