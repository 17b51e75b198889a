"""Encoding by tiktoken gives what the tokenizer's own library gives, or is not done."""

import base64
import json

import pytest
from mqo.data import encode
from mqo.errors import DataError
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors


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
    return [ids.tolist() for ids in encoder.encode(texts)]


def _split(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


@pytest.mark.parametrize("pattern", [None, encode._LLAMA3, encode._O200K])
def test_tiktoken_encodes_as_the_tokenizers_library(change, prose, pattern):
    def edit(table):
        if pattern:
            table.pre_tokenizer = _split(pattern)

    folder = change(edit)
    fast, slow = encode.load(folder), encode.load(folder, "tokenizers")
    assert (fast.engine, slow.engine) == ("tiktoken", "tokenizers")
    assert _ids(fast, prose) == _ids(slow, prose)
    assert (fast.vocab_size, fast.eod, fast.digest) == (slow.vocab_size, slow.eod, slow.digest)
    assert (fast.vocab_size, fast.eod) == (400, 0)


def test_a_marker_within_a_text_is_text(words):
    for engine in ("tiktoken", "tokenizers"):
        [ids] = _ids(encode.load(words, engine), ["a <|endoftext|> b"])
        assert 0 not in ids


def test_what_the_tokenizer_puts_around_a_text_is_put_there(change):
    def edit(table):
        around = [("<|endoftext|>", 0), ("<|padding|>", 1)]
        table.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A <|padding|>", special_tokens=around
        )

    encoder = encode.load(change(edit))
    assert encoder.engine == "tiktoken"
    [ids] = _ids(encoder, ["The miller"])
    assert (ids[0], ids[-1]) == (0, 1)
    assert [ids] == _ids(encoder.slow, ["The miller"])


def _normalized(table):
    table.normalizer = normalizers.NFC()


def _spaced(table):
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def _oddly_split(table):
    table.pre_tokenizer = _split(r"\w+|\W+")


def _with_a_word(table):
    table.add_tokens(["miller"])


@pytest.mark.parametrize("edit", [_normalized, _spaced, _oddly_split, _with_a_word])
def test_a_vocabulary_that_tiktoken_cannot_take_is_left_to_its_library(change, edit):
    folder = change(edit)
    assert encode.load(folder).engine == "tokenizers"
    with pytest.raises(DataError, match="tiktoken cannot take the vocabulary"):
        encode.load(folder, "tiktoken")


def test_ids_out_of_the_order_of_merges_are_left_to_the_library(words):
    path = words / "tokenizer.json"
    table = json.loads(path.read_text())
    names = sorted(table["model"]["vocab"], key=table["model"]["vocab"].get)
    table["model"]["vocab"].update({names[-1]: 300, names[300]: len(names) - 1})
    path.write_text(json.dumps(table))
    assert encode.load(words).engine == "tokenizers"


def test_a_truncating_tokenizer_does_not_truncate(change):
    encoder = encode.load(change(lambda table: table.enable_truncation(2)), "tokenizers")
    assert len(_ids(encoder, ["The miller weighs the flour"])[0]) > 2


def test_engines_that_differ_on_the_corpus_leave_it_to_the_library(words, prose):
    encoder = encode.load(words)
    assert encode.agreed(encoder, prose) is encoder
    broken = encode.Encoder(
        "tiktoken", lambda texts: encoder.encode(["!"] * len(texts)), 400, 0, ""
    )
    both = encode.replace(broken, slow=encoder.slow)
    assert encode.agreed(both, prose) is encoder.slow
    assert encode.agreed(broken, prose) is broken  # nothing to compare with


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
    assert (encoder.engine, encoder.eod, encoder.vocab_size) == ("tiktoken", 50_256, 50_257)
    # 'a' 'b' is the token of the two bytes; a digit stands apart from a letter.
    assert _ids(encoder, ["ab1"]) == [[256 + 256 * ord("a") + ord("b"), ord("1")]]
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match=r"holds 50,255 ranks.*50,256"):
        encode.load(path)
    path.write_text("no ranks at all")
    with pytest.raises(DataError, match="is no file of ranks"):
        encode.load(path)


def test_upstreams_list_of_tokens_begins_after_its_markers(tmp_path):
    path = tmp_path / "vocabulary.json"
    tokens = [*_letters(256), b"ab", b"abc"]
    rows = [{"rank": n, "token_bytes": base64.b64encode(t).decode()} for n, t in enumerate(tokens)]
    path.write_text(json.dumps(rows))
    encoder = encode.tekken(path, "v2", special=10, size=10 + 257)
    assert (encoder.eod, encoder.vocab_size) == (2, 267)
    assert _ids(encoder, ["abc"]) == [[10 + 256, 10 + ord("c")]]  # the last one was cut off


def test_what_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match="no tokenizer at"):
        encode.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"no readable tokenizer\.json"):
        encode.load(tmp_path)
