"""Which Hugging Face folders hold weights in full precision."""

import json
import os

import pytest
import torch
from mqo.megatron.run.errors import SavedError
from mqo.megatron.run.hf_kind import INDEX, ONE_FILE, check_folder
from safetensors.torch import save_file

QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.float64)


@pytest.fixture
def folder(tmp_path):
    """A folder with one tensor in bf16."""
    write(tmp_path, a=torch.zeros(2, 3).bfloat16())
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def write(folder, name=ONE_FILE, **tensors):
    save_file(tensors, folder / name, {"format": "pt"})


def refusal(folder):
    with pytest.raises(SavedError) as caught:
        check_folder(folder)
    return caught.value.facts


def test_weights_in_full_precision_are_taken_in_one_file_and_in_several(folder):
    check_folder(folder)
    (folder / "config.json").write_text('{"quantization_config": null}')
    check_folder(folder)
    write(folder, "one.safetensors", b=torch.zeros(1), c=torch.zeros(1).half())
    buffer = {"layers.0.rotary_emb.inv_freq": torch.zeros(1).double()}
    save_file(buffer, folder / "two.safetensors")
    index = {"weight_map": {"b": "one.safetensors", "x": "two.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / ONE_FILE).unlink()
    check_folder(folder)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("sharded", [False, True])
def test_other_dtypes_are_refused_by_the_tensor(folder, dtype, sharded):
    write(folder, "two.safetensors" if sharded else ONE_FILE, b=torch.zeros(4).to(dtype))
    if sharded:
        index = {"weight_map": {"a": ONE_FILE, "b": "two.safetensors"}}
        (folder / INDEX).write_text(json.dumps(index))
    assert " b as " in refusal(folder)["found"]


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "bitsandbytes", None])
def test_a_quantization_config_is_refused_whatever_the_tensors_are(folder, method):
    config = {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    assert f"quantization_config of {method}" in refusal(folder)["found"]


def test_our_own_layout_says_how_to_write_it_in_full(folder):
    (folder / ONE_FILE).rename(folder / f"packed_{ONE_FILE}")
    config = {"quantization_config": {"quant_method": "mqo"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "dequantize.py" in refusal(folder)["help"]


def test_missing_files_are_named(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": ONE_FILE, "b": "gone"}}))
    assert "names gone, which is not" in refusal(folder)["found"]
    (folder / INDEX).unlink()
    (folder / ONE_FILE).unlink()
    assert refusal(folder)["help"] == ""
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle" in refusal(folder)["found"]
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder)["found"]


@pytest.mark.parametrize("name", ["config.json", ONE_FILE])
def test_a_pipe_is_not_read(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert name in refusal(folder)["found"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        (2**62).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        b"\xff" * 64,
    ],
)
def test_a_file_that_is_not_safetensors_is_named(folder, content):
    (folder / ONE_FILE).write_bytes(content)
    assert f"{ONE_FILE} cannot be read" in refusal(folder)["found"]
