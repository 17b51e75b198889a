"""The .bin/.idx pair: as a sample gets it, and the check of a prefix that the user gives."""

import json
import struct

import pytest
from mqo.data import index, tokenizer
from mqo.errors import DataError
from tokenizers import Tokenizer

_DOCUMENTS = [
    "The miller weighs the flour.",
    "",
    "A marker such as <|endoftext|> within a document does not end it.",
    "The baker pays the miller \u2014 in bread.",
]


@pytest.fixture
def words(tmp_path):
    folder = tmp_path / "the words"
    tokenizer.train(iter(_DOCUMENTS), folder, 270)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "the text.jsonl"
    lines = [json.dumps({"text": document}) for document in _DOCUMENTS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_documents_follow_each_other_each_ended_by_one_eod(tmp_path, words, text):
    counts = index.build_index(text, words, tmp_path / "out" / "mine")
    encoder = Tokenizer.from_file(str(words / "tokenizer.json"))
    encoder.encode_special_tokens = True
    expected = [[*encoder.encode(d).ids, 0] for d in _DOCUMENTS if d]
    flat = [i for ids in expected for i in ids]
    assert counts == index.IndexCounts(documents=3, tokens=len(flat))

    prefix = tmp_path / "out" / "mine_text_document"
    index.check_prefix(prefix)
    content = prefix.with_suffix(".bin").read_bytes()
    assert list(struct.unpack(f"<{len(flat)}H", content)) == flat  # two bytes a token
    assert flat.count(0) == 3
    assert {p.name for p in prefix.parent.iterdir()} == {f"{prefix.name}.bin", f"{prefix.name}.idx"}


def test_a_bad_line_of_a_sample_is_an_error(tmp_path, words, text):
    text.write_text('{"title": "no text"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"the text\.jsonl:1: no JSON object with text"):
        index.build_index(text, words, tmp_path / "out" / "mine")
    assert not list((tmp_path / "out").glob("*.idx"))


def _pair(prefix):
    for suffix in (".bin", ".idx"):
        prefix.with_name(prefix.name + suffix).touch()


def test_a_whole_prefix_passes_even_with_a_point_in_its_name(tmp_path):
    _pair(tmp_path / "mix-v1.7_text_document")
    index.check_prefix(tmp_path / "mix-v1.7_text_document")


def test_half_a_prefix_names_the_missing_half(tmp_path):
    (tmp_path / "mine.bin").touch()
    with pytest.raises(DataError) as caught:
        index.check_prefix(tmp_path / "mine")
    assert caught.value.found.startswith("mine.idx is missing")
    assert "mine.bin" in caught.value.found.partition(";")[2]


def test_a_misspelt_prefix_shows_the_near_ones(tmp_path):
    _pair(tmp_path / "wikipedia_text_document")
    with pytest.raises(DataError, match="the folder holds wikipedia_text_document"):
        index.check_prefix(tmp_path / "wikipaedia_text_document")


def test_a_prefix_with_an_ending_is_put_right(tmp_path):
    _pair(tmp_path / "mine")
    with pytest.raises(DataError) as caught:
        index.check_prefix(tmp_path / "mine.bin")
    assert caught.value.help == f"Give the prefix without its ending: {tmp_path / 'mine'}"


def test_a_prefix_without_the_json_key_is_put_right(tmp_path):
    _pair(tmp_path / "mine_text_document")
    with pytest.raises(DataError) as caught:
        index.check_prefix(tmp_path / "mine")
    assert str(tmp_path / "mine_text_document") in caught.value.help


def test_a_missing_folder_is_said_to_be_missing(tmp_path):
    with pytest.raises(DataError, match="there is no such folder"):
        index.check_prefix(tmp_path / "nowhere" / "mine")
