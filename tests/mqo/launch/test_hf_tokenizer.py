"""The tokenizer of a converted model: which one, which files, which ids."""

import json
from dataclasses import asdict

import pytest
from mqo.errors import ConvertError
from mqo.launch import hf_tokenizer
from mqo.launch.inputs import Inputs
from mqo.runs import RunFolder
from tokenizers import AddedToken, Tokenizer, models

TYPE = "HuggingFaceTokenizer"


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    """A tokenizer: 0 and 1 are words, 2 ends a document, 3 begins one."""
    made = tmp_path / "tokenizer"
    made.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<end>"), AddedToken("<begin>")])
    tokenizer.save(str(made / "tokenizer.json"))
    write(made, "tokenizer_config.json", {"eos_token": "<end>", "bos_token": None})
    return made


def test_ids_are_those_of_the_tokens_that_the_files_name(folder):
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
    assert hf_tokenizer.special_ids(folder) == ids
    write(folder, "special_tokens_map.json", {"pad_token": {"content": "b"}, "eos_token": "a"})
    # What the configuration says counts, as it does in transformers.
    assert hf_tokenizer.special_ids(folder) == ids | {"pad_token_id": 1}
    write(folder, "tokenizer_config.json", {"eos_token": "no such token"})
    assert hf_tokenizer.special_ids(folder)["eos_token_id"] is None


def test_a_models_configuration_fills_in_and_is_not_preferred(folder):
    write(folder, "config.json", {"eos_token_id": 0, "bos_token_id": 3})
    assert hf_tokenizer.special_ids(folder) == {
        "bos_token_id": 3,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    write(folder, "config.json", {"eos_token_id": [1, 2]})  # it stops at several
    assert hf_tokenizer.special_ids(folder)["eos_token_id"] == [1, 2]


def test_settings_of_a_published_generation_are_kept(folder):
    ids = hf_tokenizer.special_ids(folder)
    assert hf_tokenizer.generation_config(folder, ids) == {"eos_token_id": 2}
    published = {"temperature": 0.6, "eos_token_id": [2, 0], "bos_token_id": 3}
    write(folder, "generation_config.json", published | {"_from_model_config": True})
    assert hf_tokenizer.generation_config(folder, ids) == published
    write(folder, "generation_config.json", {"eos_token_id": 1})
    assert hf_tokenizer.generation_config(folder, ids) == {"eos_token_id": 2}
    assert hf_tokenizer.generation_config(None, hf_tokenizer.special_ids(None)) == {}


def test_code_is_never_copied(folder, tmp_path):
    for name in ("tokenization_x.py", "tokenizer.py", "tokenizer_config.json.py", "model.bin"):
        (folder / name).write_text("import os")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    code = {"AutoTokenizer": ["tokenization_x.X", None]}
    write(folder, "tokenizer_config.json", {"eos_token": "<end>", "auto_map": code})
    stage = tmp_path / "stage"
    stage.mkdir()
    hf_tokenizer.copy(folder, stage)
    copied = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in stage.iterdir()} == copied
    found = json.loads((stage / "tokenizer_config.json").read_text())
    assert found == {"eos_token": "<end>"}


def test_files_are_copied_to_the_byte(folder, tmp_path):
    stage = tmp_path / "stage"
    stage.mkdir()
    hf_tokenizer.copy(folder, stage)
    for path in stage.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_tokenizer_in_a_file_is_its_folder(folder):
    args = {"tokenizer_type": TYPE, "tokenizer_model": str(folder / "tokenizer.json")}
    assert hf_tokenizer.choose(None, args, None) == (folder, "")


@pytest.mark.parametrize(
    ("kind", "place", "word"),
    [
        (TYPE, None, "The checkpoint names no tokenizer"),
        ("TikTokenizer", "ranks.json", "TikTokenizer"),
        (TYPE, "meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),  # a name on a hub: nothing is fetched
    ],
)
def test_what_cannot_be_copied_is_said(kind, place, word):
    args = {"tokenizer_type": kind, "tokenizer_model": place}
    found, note = hf_tokenizer.choose(None, args, None)
    assert found is None
    assert word in note and "--tokenizer" in note


def test_a_tokenizer_that_has_changed_since_the_run_is_not_taken(folder, tmp_path):
    run = RunFolder(tmp_path)
    recorded = Inputs.read_by(["--tokenizer-model", str(folder)])
    facts = {"python": "3.11.9", "cores": 2, "packages": {}, "inputs": asdict(recorded)}
    run.environment.write_text(json.dumps(facts))
    args = {"tokenizer_type": TYPE, "tokenizer_model": str(folder)}
    assert hf_tokenizer.choose(None, args, run) == (folder, "")
    write(folder, "tokenizer_config.json", {"eos_token": "a"})
    found, note = hf_tokenizer.choose(None, args, run)
    assert found is None
    assert "tokenizer_config.json has changed" in note
    assert hf_tokenizer.choose(folder, args, run) == (folder, "")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(ConvertError, match=name):
        hf_tokenizer.special_ids(folder)


def test_padding_is_of_the_multiple_that_the_training_had(folder):
    # Four tokens: in ranks of two, and multiples of 3, they were padded to 6 rows.
    args = {"make_vocab_size_divisible_by": 3, "tensor_model_parallel_size": 2}
    assert hf_tokenizer.rows(args, 6, folder) == (4, "")
    stored, note = hf_tokenizer.rows(args, 12, folder)
    assert stored == 12 and "12 rows for 4 tokens" in note
    assert hf_tokenizer.rows(args, 6, None) == (6, "")


def test_a_tokenizer_that_transformers_reads_as_another_class_is_noted(tmp_path):
    config = tmp_path / hf_tokenizer.CONFIG
    for own, is_noted in (("PreTrainedTokenizerFast", True), ("Qwen2TokenizerFast", False)):
        config.write_text(json.dumps({"tokenizer_class": own}))
        assert bool(hf_tokenizer.class_note(tmp_path, "Qwen2Tokenizer")) is is_noted
        assert hf_tokenizer.class_note(tmp_path, "") == ""
    assert hf_tokenizer.class_note(None, "Qwen2Tokenizer") == ""
