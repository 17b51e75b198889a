"""The tensors of a folder, by its one file or by its index."""

import json

import pytest
import torch
from megatron.inference.errors import SavedError
from megatron.inference.hf_folder import StoredTensor, stored_tensors
from megatron.inference.hf_kind import INDEX
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
    with pytest.raises(SavedError, match=r"no model\.safetensors in"):
        stored_tensors(tmp_path)
    write(tmp_path, a=torch.zeros(64, 64))
    content = (tmp_path / "model.safetensors").read_bytes()
    absurd = (2**62).to_bytes(8, "little") + content[8:]
    for wrong in (content[:1000], absurd):
        (tmp_path / "model.safetensors").write_bytes(wrong)
        with pytest.raises(SavedError, match=r"model\.safetensors cannot be read"):
            stored_tensors(tmp_path)
