"""The .bin/.idx pair: the indexing program, and the check of a prefix that the user gives."""

import gzip
import importlib.util
import json
import struct
from pathlib import Path

import pytest
from mqo.data import index, tokenizer
from mqo.errors import DataError, OverlayError
from tokenizers import Tokenizer

_TREE = Path(__file__).resolve().parents[3] / "Megatron-LM"
_materialised = pytest.mark.skipif(
    not (_TREE / "megatron" / "core").is_dir(),
    reason="Megatron-LM/megatron/core is not materialised: run 'mqo vendor' and 'mqo apply'",
)
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


@pytest.fixture(scope="module")
def program():
    """The indexing program as a module; its top imports neither torch nor Megatron."""
    spec = importlib.util.spec_from_file_location("indexer", _TREE / "tools" / "preprocess_data.py")
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks its own module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "indexer", module)
        spec.loader.exec_module(module)
        yield module


@_materialised
def test_documents_follow_each_other_each_ended_by_one_eod(tmp_path, words, text):
    counts = index.build_index(_TREE, text, words, tmp_path / "out" / "mine")
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
    # The index: magic, version, code of the type, sequences, documents + 1, lengths.
    head = prefix.with_suffix(".idx").read_bytes()
    magic, _version, _code, sequences, bounds = struct.unpack_from("<9sQBQQ", head)
    assert (magic, sequences, bounds) == (b"MMIDIDX\x00\x00", 3, 4)
    lengths = struct.unpack_from("<3i", head, struct.calcsize("<9sQBQQ"))
    assert list(lengths) == [len(ids) for ids in expected]
    assert {p.name for p in prefix.parent.iterdir()} == {f"{prefix.name}.bin", f"{prefix.name}.idx"}


@_materialised
def test_a_failing_indexer_is_quoted(tmp_path, words, text):
    text.write_text('{"title": "no text"}\n', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        index.build_index(_TREE, text, words, tmp_path / "out" / "mine")
    assert "line 1: no JSON object with text" in caught.value.found
    assert not list((tmp_path / "out").glob("*.idx"))


def test_a_tree_without_megatron_is_named(tmp_path, words, text):
    with pytest.raises(OverlayError, match=r"holds no megatron\.core.*mqo vendor"):
        index.build_index(tmp_path, text, words, tmp_path / "mine")


def test_gzipped_lines_read_as_plain_ones(program, tmp_path, text):
    packed = tmp_path / "text.json.gz"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    documents = [(d,) for d in _DOCUMENTS]
    assert list(program.read_documents(packed, ["text"])) == documents
    assert list(program.read_documents(text, ["text"])) == documents


@pytest.mark.parametrize("line", ["{", "[1]", '{"title": "x"}', '{"text": 3}'])
def test_a_bad_line_is_named_by_its_number(program, tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="line 2"):
        list(program.read_documents(path, ["text"]))


def test_the_end_of_document_id_comes_from_the_tokenizers_configuration(program, words):
    _, eod = program.load_tokenizer(words)
    assert eod == 0
    config = json.loads((words / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": tokenizer.PADDING}  # the older, longer form
    (words / "tokenizer_config.json").write_text(json.dumps(config))
    assert program.load_tokenizer(words)[1] == 1


def test_a_folder_without_tokenizer_is_named(program, tmp_path):
    with pytest.raises(SystemExit, match=r"no readable tokenizer\.json"):
        program.load_tokenizer(tmp_path)


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
