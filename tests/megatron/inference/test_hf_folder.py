"""The tensors of a folder, by its one file or by its index."""

import json

import pytest
import torch
from mqo.megatron.run.errors import SavedError
from mqo.megatron.run.hf_kind import INDEX, StoredTensor, check_config, stored_tensors
from safetensors.torch import save_file


def write(folder, name="model.safetensors", **tensors):
    save_file(tensors, folder / name)


def test_what_a_folder_stores_is_read_by_its_index(tmp_path):
    write(tmp_path, a=torch.zeros(2, 3), **{"layers.0.rotary_emb.inv_freq": torch.zeros(4)})
    (found,) = stored_tensors(tmp_path).items()
    assert found == ("a", StoredTensor(tmp_path / "model.safetensors", (2, 3), "F32"))
    write(tmp_path, "one.safetensors", b=torch.zeros(1).bfloat16())
    write(tmp_path, "two.safetensors", c=torch.zeros(5).bfloat16())
    index = {"weight_map": {"b": "one.safetensors", "c": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    found = stored_tensors(tmp_path)
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {
        "b": ((1,), "BF16"),
        "c": ((5,), "BF16"),
    }


def test_files_that_are_missing_or_cut_short_are_named(tmp_path):
    with pytest.raises(SavedError, match=r"model\.safetensors"):
        stored_tensors(tmp_path)
    write(tmp_path, a=torch.zeros(64, 64))
    content = (tmp_path / "model.safetensors").read_bytes()
    absurd = (2**62).to_bytes(8, "little") + content[8:]
    for wrong in (content[:1000], absurd):
        (tmp_path / "model.safetensors").write_bytes(wrong)
        with pytest.raises(SavedError, match=r"model\.safetensors cannot be read"):
            stored_tensors(tmp_path)


KEYS = ("eos_token_id", "bos_token_id", "hidden_size", "vocab_size", "rope_parameters", "dtype")
KEYS += ("rms_norm_eps", "tie_word_embeddings", "architectures", "model_type", "hidden_act")
VALUES = ({}, [[]], "x", -1, 1e308, None, True, {"a": [1]}, 2**70)


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_a_config_is_taken_or_refused_in_a_sentence(tmp_path, key):
    outcomes = set()
    sound = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}
    for value in VALUES:
        (tmp_path / "config.json").write_text(json.dumps(sound | {key: value}))
        try:
            check_config(tmp_path)
            outcomes.add("taken")
        except SavedError as error:
            outcomes.add("refused")
            assert "config.json" in str(error)
            assert "\n" not in str(error)
    assert "refused" in outcomes or key in ("architectures", "hidden_act")
    (tmp_path / "config.json").write_text(json.dumps(sound))
    check_config(tmp_path)
