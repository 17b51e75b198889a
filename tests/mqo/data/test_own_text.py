"""The user's text files: what identifies them, what is left out of them, and the index of them."""

import gzip
import json
import shutil

import pyarrow
import pyarrow.parquet
import pytest
from mqo.data import own_text, tokenizer
from mqo.data import prepare as prepare_module
from mqo.data.own_text import prepare_text, survey, text_files
from mqo.errors import DataError, MissingError
from mqo.project import Project

from .conftest import count_lines

SENTENCE = "The miller weighs {n} sacks of flour before the bell rings."
GOOD = [{"text": SENTENCE.format(n=n)} for n in range(8)]
BAD = b"""{"text": "fine"}
{"text": broken
{"title": "x"}

[1]
{"text": 3}
{"text": " "}
{"text": "\xff"}
{"text": ""}
"""


def jsonl(path, rows=GOOD):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout; indexing counts lines only."""
    monkeypatch.setattr(tokenizer, "DEFAULT_VOCAB_SIZE", 270)
    monkeypatch.setattr(prepare_module, "build_index", count_lines)
    return Project(tmp_path / "checkout")


def read(path):
    bad = {}
    texts = list(own_text.documents(path, bad))
    return texts, {row.kind: (row.count, row.line) for row in bad.values()}


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl", bytes), ("a.json.gz", gzip.compress)])
def test_bad_records_are_counted_by_kind_with_their_first_line(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(BAD))
    kinds = {"not JSON": (1, 2), "without a text": (3, 3), "empty": (2, 7), "not UTF-8": (1, 8)}
    assert read(path) == (["fine"], kinds)


def test_a_parquet_file_gives_its_texts(tmp_path):
    table = pyarrow.table({"text": ["one", None, "", "two"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    expected = ["one", "two"], {"without a text": (1, 2), "empty": (1, 3)}
    assert read(tmp_path / "a.parquet") == expected


@pytest.mark.parametrize("gap", ["\n\n", "\n"])
def test_a_plain_text_is_cut_into_documents_at_lines(tmp_path, gap):
    text = "\ufeff" + gap.join(SENTENCE.format(n=n) for n in range(700))
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    parts, bad = read(path)
    assert "".join(parts) == text.removeprefix("\ufeff")
    assert bad == {}
    assert 15 < len(parts) <= 100
    assert all(part.startswith("The miller") for part in parts)


def test_a_part_that_is_not_text_is_named_by_its_line(tmp_path):
    lines = [SENTENCE.format(n=n).encode() for n in range(700)]
    lines[300] += b"\xff"
    (tmp_path / "a.md").write_bytes(b"\n".join(lines))
    parts, bad = read(tmp_path / "a.md")
    assert bad == {"not UTF-8": (1, 301)}
    assert len(parts) > 10


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.txt", b""),
        ("binary.txt", b"ab\0cd"),
        ("utf16.jsonl", '{"text": "a"}'.encode("utf-16")),
        ("packed.txt.gz", gzip.compress(b"\0" * 10, mtime=0)),
        ("damaged.txt.gz", b"not packed"),
        ("weights.bin", b"text"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        text_files([tmp_path / name], "a", None)
    assert name in caught.value.found


def test_a_folder_a_missing_and_a_repeated_file_are_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    for files in ([tmp_path], [path, path]):
        with pytest.raises(DataError):
            text_files(files, "a", None)
    with pytest.raises(MissingError):
        text_files([tmp_path / "none.txt"], "a", None)
    with pytest.raises(MissingError):
        text_files([path], "a", tmp_path / "no tokenizer")


def test_a_text_of_fewer_than_two_documents_is_refused(tmp_path, project):
    text = text_files([jsonl(tmp_path / "a.jsonl", GOOD[:1])], "a", None)
    for refuse in (survey, lambda text: prepare_text(project, text, None, report=print)):
        with pytest.raises(DataError, match="two documents"):
            refuse(text)
    assert text.contents(project) is None


def test_strict_refuses_bad_records_also_of_an_index_that_is_there(tmp_path, project):
    path = jsonl(tmp_path / "a.jsonl", [*GOOD, {}])
    strict, lenient = (text_files([path], "a", None, strict=s) for s in (True, False))
    assert strict.folder(project) == lenient.folder(project)
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:9"):
            survey(strict)
        with pytest.raises(DataError, match=r"a\.jsonl:9"):
            prepare_text(project, strict, None, report=print)
        prepare_text(project, lenient, None, report=print)


# -- the cache -------------------------------------------------------------------------------------


def test_the_key_depends_on_contents_kind_and_tokenizer_and_not_on_paths(tmp_path, project, words):
    path = jsonl(tmp_path / "a.jsonl")
    key = text_files([path], "a", None).folder(project)
    (tmp_path / "other").mkdir()
    shutil.copy(path, tmp_path / "other/b.json")
    assert text_files([tmp_path / "other/b.json"], "a", None).folder(project) == key
    other = jsonl(tmp_path / "c.jsonl", GOOD[1:])
    plain = shutil.copy(path, tmp_path / "a.txt")
    texts = [
        text_files([path], "a", words),
        text_files([other], "a", None),
        text_files([path, other], "a", None),
        text_files([other, path], "a", None),
        text_files([plain], "a", None),
        text_files([path], "b", None),
    ]
    assert len({key, *(text.folder(project) for text in texts)}) == 1 + len(texts)
    config = words / "tokenizer_config.json"
    before = text_files([path], "a", words).folder(project)
    config.write_text(config.read_text() + " ")
    assert text_files([path], "a", words).folder(project) != before


def test_a_text_is_indexed_once(tmp_path, project, monkeypatch):
    text = text_files([jsonl(tmp_path / "a.jsonl", [*GOOD, {"text": ""}])], "a", None)
    contents = prepare_text(project, text, None, report=print)
    assert (contents.documents, contents.tokens) == (8, 80)
    assert 258 < contents.vocab_size <= 270
    assert [(row.kind, row.count, row.file, row.line) for row in contents.bad] == [
        ("empty", 1, "a.jsonl", 9)
    ]
    trained, prefix = text.paths(project)
    assert (trained / "tokenizer.json").is_file()
    assert prefix.with_name(prefix.name + ".bin").is_file()
    monkeypatch.setattr(prepare_module, "build_index", None)
    (tmp_path / "a.jsonl").unlink()
    said = []
    assert prepare_text(project, text, None, report=said.append) == contents
    assert said == []


def test_a_given_tokenizer_is_used_and_compared(tmp_path, project, words):
    text = text_files([jsonl(tmp_path / "a.jsonl")], "a", words)
    contents = prepare_text(project, text, words, report=print)
    assert contents.vocab_size == 400
    assert not text.paths(project)[0].exists()
    (words / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has changed"):
        prepare_text(project, text, words, report=print)


def test_a_text_that_changed_since_it_was_named_is_refused(tmp_path, project):
    text = text_files([jsonl(tmp_path / "a.jsonl")], "a", None)
    jsonl(tmp_path / "a.jsonl", GOOD[1:])
    with pytest.raises(DataError, match=r"a\.jsonl has changed"):
        prepare_text(project, text, None, report=print)
    assert text.contents(project) is None
