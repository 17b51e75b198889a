"""Which tokenizer belongs to a model that is quantized, and what is no model."""

import pytest
from mqo.errors import ConvertError
from mqo.launch.ptq_source import find_checkpoint, find_tokenizer


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConvertError, match=f"checkpoint in {tmp_path}"):
        find_checkpoint(tmp_path, tmp_path, tmp_path)


def test_the_tokenizer_is_the_one_that_belongs_to_the_model(tmp_path):
    def tokenizer(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").touch()
        return tmp_path / name

    model, trained, sample = tmp_path / "model", tokenizer("trained"), tokenizer("sample")
    model.mkdir()
    said = {"tokenizer_model": str(trained)}
    assert find_tokenizer(model, said, sample) == trained  # and not the sample's
    assert find_tokenizer(model, {}, sample) == sample
    with pytest.raises(ConvertError, match=rf"tokenizer\.json in {model}.*--tokenizer-model"):
        find_tokenizer(model, {}, None)
    (model / "tokenizer.json").touch()
    assert find_tokenizer(model, said, sample) == model
