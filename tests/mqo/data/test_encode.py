"""Each format of a tokenizer gives the ids of the library that defines it."""

import base64
import json

import pytest
from mqo.data import encode
from mqo.errors import DataError
from tokenizers import Tokenizer, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode


@pytest.fixture
def change(words):
    """Applies a function to the tokenizer of the folder, and gives the folder."""

    def apply(edit):
        path = words / "tokenizer.json"
        table = Tokenizer.from_file(str(path))
        edit(table)
        table.save(str(path))
        return words

    return apply


def _ids(encoder, texts):
    return encoder.encode(texts)


def test_a_marker_within_a_text_is_text(words):
    [ids] = _ids(encode.load(words), ["a <|endoftext|> b"])
    assert 0 not in ids


def test_what_the_tokenizer_puts_around_a_text_is_put_there(change):
    def edit(table):
        around = [("<|endoftext|>", 0), ("<|padding|>", 1)]
        table.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A <|padding|>", special_tokens=around
        )

    [ids] = _ids(encode.load(change(edit)), ["The miller"])
    assert (ids[0], ids[-1]) == (0, 1)


def test_a_truncating_tokenizer_does_not_truncate(change):
    encoder = encode.load(change(lambda table: table.enable_truncation(2)))
    assert len(_ids(encoder, ["The miller weighs the flour"])[0]) > 2


def test_the_end_of_a_document_comes_from_the_configuration(words):
    config = json.loads((words / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "<|padding|>"}  # the older, longer form
    (words / "tokenizer_config.json").write_text(json.dumps(config))
    assert encode.load(words).eod == 1
    assert encode.load(words / "tokenizer.json").eod == 1


@pytest.fixture
def gpt2_files(words):
    """The vocabulary in GPT-2's two files."""
    model = json.loads((words / "tokenizer.json").read_text())["model"]
    folder = words.parent / "two files"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n")
    return folder


def test_gpt2s_two_files_give_the_same_ids(words, gpt2_files, prose):
    encoder = encode.load(gpt2_files)
    assert encoder.eod == 0
    assert _ids(encoder, prose[:-1]) == _ids(encode.load(words), prose[:-1])


def _letters(count):
    """Tokens of that many ranks: the bytes, then strings of two and three."""
    tokens = [bytes([b]) for b in range(256)]
    tokens += [bytes([n >> 8, n & 255]) for n in range(min(count - 256, 1 << 16))]
    return tokens + [b"\0" + n.to_bytes(2) for n in range(count - len(tokens))]


def test_a_file_of_ranks_is_known_by_their_number(tmp_path):
    path = tmp_path / "tokenizer.model"
    lines = [f"{base64.b64encode(t).decode()} {n}" for n, t in enumerate(_letters(50_256))]
    path.write_text("\n".join(lines) + "\n")
    encoder = encode.load(path)
    assert (encoder.eod, encoder.vocab_size) == (50_256, 50_257)
    # 'a' 'b' is the token of the two bytes; a digit stands apart from a letter.
    assert _ids(encoder, ["ab1"]) == [[256 + 256 * ord("a") + ord("b"), ord("1")]]
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match=r"50,255 .*50,256"):
        encode.load(path)
    path.write_text("no ranks at all")
    with pytest.raises(DataError, match=r"base64.*tokenizer\.model"):
        encode.load(path)


@pytest.mark.parametrize("pattern", [encode._GPT2, encode._LLAMA3, encode._O200K])
def test_ranks_give_tiktokens_ids(words, prose, pattern, monkeypatch, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    letters = bytes_to_unicode()
    model = json.loads((words / "tokenizer.json").read_text())["model"]
    spelt = {letter: byte for byte, letter in letters.items()}
    tokens = [bytes(map(spelt.get, token)) for token in model["vocab"] if token[0] != "<"]
    tokens = [bytes([n]) for n in range(256)] + [token for token in tokens if len(token) > 1]
    monkeypatch.setitem(encode._RANK_FILES, len(tokens), (pattern, 0, len(tokens)))
    lines = [f"{base64.b64encode(token).decode()} {n}\n" for n, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    ranks = {token: n for n, token in enumerate(tokens)}
    theirs = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    found = _ids(encode.load(tmp_path / "tokenizer.model"), prose)
    assert found == [theirs.encode_ordinary(text) for text in prose]


def test_upstreams_list_of_tokens_begins_after_its_markers(tmp_path):
    path = tmp_path / "vocabulary.json"
    tokens = [*_letters(256), b"ab", b"abc"]
    rows = [{"rank": n, "token_bytes": base64.b64encode(t).decode()} for n, t in enumerate(tokens)]
    path.write_text(json.dumps(rows))
    encoder = encode.tekken(path, "v2", special=10, size=10 + 257)
    assert (encoder.eod, encoder.vocab_size) == (2, 267)
    assert _ids(encoder, ["abc"]) == [[10 + 256, 10 + ord("c")]]  # the last one was cut off


def test_what_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=rf"{tmp_path}\. .*vocab\.json and merges\.txt"):
        encode.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json with tokenizer_config\.json"):
        encode.load(tmp_path)
