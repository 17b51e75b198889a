"""An index and a tokenizer that belong together, and those that do not."""

import json
import struct
from array import array

import pytest
from mqo.data import pair_check
from mqo.errors import DataError


@pytest.fixture
def pair(tmp_path):
    """A function that writes an index of some ids and a tokenizer of some size."""

    def write(ids, size=100, code=8, added=()):
        prefix, tokenizer = tmp_path / "my corpus", tmp_path / "tokenizer"
        head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, 1, 2)
        (tmp_path / "my corpus.idx").write_bytes(head)
        (tmp_path / "my corpus.bin").write_bytes(array({8: "H", 4: "i"}[code], ids).tobytes())
        tokenizer.mkdir(exist_ok=True)
        vocabulary = {f"t{i}": i for i in range(size)}
        table = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": i} for i in added]}
        (tokenizer / "tokenizer.json").write_text(json.dumps(table))
        return tokenizer, prefix

    return write


@pytest.mark.parametrize("code", [4, 8])
def test_an_index_of_its_tokenizers_ids_fits(pair, code):
    pair_check.check_fit(*pair([0, 99, 5], code=code))


def test_an_added_token_counts(pair):
    pair_check.check_fit(*pair([100], added=[100]))


@pytest.mark.parametrize("code", [4, 8])
def test_an_id_that_the_tokenizer_does_not_have_is_named(pair, code):
    with pytest.raises(DataError, match=r"my corpus .*token 100, .*tokenizer .* 99"):
        pair_check.check_fit(*pair([3, 100, 5], code=code))


def test_a_large_index_is_looked_at_in_parts(pair, monkeypatch):
    monkeypatch.setattr(pair_check, "_WINDOW", 10)
    monkeypatch.setattr(pair_check, "_WINDOWS", 4)
    ids = [1] * 400
    ids[300] = 120  # the first of the last part
    with pytest.raises(DataError, match="token 120"):
        pair_check.check_fit(*pair(ids))


def test_an_empty_index_and_an_unknown_tokenizer_are_not_judged(pair, tmp_path):
    tokenizer, prefix = pair([])
    pair_check.check_fit(tokenizer, prefix)
    pair([999])
    (tokenizer / "tokenizer.json").write_text("{}")
    pair_check.check_fit(tokenizer, prefix)
    pair_check.check_fit(tmp_path / "sentencepiece.model", prefix)


@pytest.mark.parametrize("head", [b"", b"MMIDIDX", b"PARQUET-1" + bytes(40)])
def test_a_file_that_is_no_index_is_refused(pair, head):
    tokenizer, prefix = pair([1])
    prefix.with_name("my corpus.idx").write_bytes(head)
    with pytest.raises(DataError, match=r"my corpus\.idx is not an index"):
        pair_check.check_fit(tokenizer, prefix)
