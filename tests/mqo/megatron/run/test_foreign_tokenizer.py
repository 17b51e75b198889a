"""A tokenizer from elsewhere is loaded and used in a child first."""

import json
import os

import pytest
from mqo.megatron.run import foreign_tokenizer, isolated
from mqo.megatron.run.foreign_tokenizer import check_tokenizer
from mqo.megatron.run.untrusted import UntrustedFileError
from tokenizers import Tokenizer, models

SLOW = (r"(a+)+$", r"(\w+\s?)+$", r"(\s+)+$", r"([0-9]+)*$")


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder."""
    made = tmp_path / "tokenizer"
    made.mkdir()
    words = {"a": 0, "b": 1}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text("{}")
    return made


def split_by(folder, pattern):
    """Have the tokenizer split text by a pattern."""
    path = folder / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    split["invert"] = False
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": split}))


def test_a_tokenizer_and_each_file_of_it_are_taken(folder):
    check_tokenizer(folder)
    split_by(folder, r"\p{L}+|\s+")
    check_tokenizer(folder)
    check_tokenizer(folder / "tokenizer.json")


def test_a_tokenizer_is_tried_once_for_each_state_of_its_files(folder, monkeypatch):
    tried = []
    monkeypatch.setattr(isolated, "try_first", lambda *of: tried.append(of))
    check_tokenizer(folder)
    check_tokenizer(folder)
    assert len(tried) == 1
    (folder / "added_tokens.json").write_text("{}")
    check_tokenizer(folder)
    assert len(tried) == 2


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_tries_every_split_is_refused(folder, pattern):
    split_by(folder, pattern)
    with pytest.raises(UntrustedFileError, match="tokenizer"):
        check_tokenizer(folder)


@pytest.mark.parametrize("name", (*foreign_tokenizer.FILES, foreign_tokenizer.MODEL))
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_read(folder, name, make):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(UntrustedFileError, match=name):
        check_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_nested_json_is_refused(folder, name):
    (folder / name).write_text("[" * 1_000_000)
    with pytest.raises(UntrustedFileError, match=name):
        check_tokenizer(folder)
