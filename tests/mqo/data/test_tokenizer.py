"""The small tokenizer: deterministic, lossless, and laid out as Megatron's options expect."""

import json

import pytest
from mqo.data import tokenizer
from tokenizers import Tokenizer

_TEXTS = [
    f"The {adjective} miller {verb} {n} sacks of flour before the bell rings."
    for n, (adjective, verb) in enumerate(
        [("old", "carries"), ("young", "weighs"), ("quiet", "counts"), ("tired", "stacks")]
    )
]


@pytest.fixture
def folder(tmp_path):
    tokenizer.train(iter(_TEXTS), tmp_path / "tokenizer", 300)
    return tmp_path / "tokenizer"


def _load(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_the_same_texts_give_the_same_files(folder, tmp_path):
    tokenizer.train(iter(_TEXTS), tmp_path / "again", 300)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize(
    "text", [_TEXTS[0], "two  spaces , a\ttab\r\nand a line", "ünïcödé \u4e2d\u6587 \U0001f35e", ""]
)
def test_any_text_comes_back_unchanged(folder, text):
    loaded = _load(folder)
    assert loaded.decode(loaded.encode(text).ids) == text


def test_markers_have_the_first_ids_and_differ(folder):
    loaded = _load(folder)
    assert loaded.get_vocab_size() == 300
    assert loaded.token_to_id(tokenizer.END_OF_DOCUMENT) == 0
    assert loaded.token_to_id(tokenizer.PADDING) == 1


def test_the_configuration_names_the_markers(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["pad_token"]) == ("<|endoftext|>", "<|padding|>")


def test_transformers_opens_the_folder_as_megatron_does(folder):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id) == (300, 0, 1)
    assert loaded(_TEXTS[1]).input_ids == _load(folder).encode(_TEXTS[1]).ids


def test_little_text_gives_a_smaller_vocabulary(tmp_path):
    size = tokenizer.train(iter(_TEXTS), tmp_path / "tokenizer", 40_000)
    assert 258 < size < 40_000
    assert _load(tmp_path / "tokenizer").get_vocab_size() == size
