"""Each command that takes a model refuses a quantized Hugging Face folder in the same words."""

import json
import os

import pytest
import torch
from mqo.launch import ptq_source
from mqo.launch.hf_config import config_of
from mqo.project import Project
from safetensors.torch import save_file

from ..odd_files import ODD
from .conftest import published_shape

# Words of a command, around the folder and a new target.
COMMANDS = {
    "hf-to-megatron": lambda source, target: ("convert", "hf-to-megatron", source, target),
    "megatron-to-hf": lambda source, target: ("convert", "megatron-to-hf", source, target),
    "export": lambda source, target: ("export", source, target, "--format", "mxfp4"),
    "export as trained": lambda source, target: ("export", source, target),
    "eval": lambda source, target: ("eval", source),
    "generate": lambda source, target: ("generate", source, "--prompt", "a"),
}
FULL = "weights in fp32, bf16 or fp16"


def fp8(folder):
    save_file({"a": torch.zeros(4).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    return {}, "holds a as F8_E4M3"


def fp8_by_config(folder):
    fp8(folder)
    return {"quantization_config": {"quant_method": "fp8"}}, "a quantization_config of fp8"


def compressed(folder):
    save_file({"a.weight_packed": torch.zeros(4).byte()}, folder / "model.safetensors")
    method = {"quant_method": "compressed-tensors"}
    return {"quantization_config": method}, "a quantization_config of compressed-tensors"


def own(folder):
    save_file({"a.codes": torch.zeros(4).byte()}, folder / "packed_model.safetensors")
    return {"quantization_config": {"quant_method": "mqo"}}, "that `mqo export` packed"


def missing_shard(folder):
    index = {"weight_map": {"a": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {}, "names gone.safetensors"


def pickled(folder):
    (folder / "pytorch_model.bin").touch()
    return {}, "pytorch_model.bin is a pickle"


KINDS = (fp8, fp8_by_config, compressed, own, missing_shard, pickled)


@pytest.fixture
def source(tmp_path):
    """A function of a kind: a folder, and what its refusal says."""

    def make(kind):
        folder = tmp_path / "source"
        folder.mkdir()
        changes, said = kind(folder)
        config = config_of(published_shape("llama31-8b"), "bf16", 4096)
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder, said

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_the_folder(command_line, source, tmp_path, kind, command):
    folder, said = source(kind)
    target = tmp_path / "made"
    code, out, err = command_line(*COMMANDS[command](folder, target))
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert not target.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_ptq_refuses_the_folder(source, tmp_path, kind):
    folder, said = source(kind)
    with pytest.raises(ptq_source.ConvertError) as caught:
        ptq_source.write(Project.here().tree, folder, tmp_path, None, None)
    assert said in str(caught.value)


@pytest.mark.parametrize("command", ["megatron-to-hf", "eval", "generate"])
def test_a_whole_folder_is_no_checkpoint_and_the_error_says_how_to_convert(
    command_line, source, tmp_path, command
):
    def whole(folder):
        save_file({"a": torch.zeros(4)}, folder / "model.safetensors")
        return {}, "mqo convert hf-to-megatron"

    folder, said = source(whole)
    code, _, err = command_line(*COMMANDS[command](folder, tmp_path / "made"))
    assert (code, said in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize("make", [*ODD, os.mkdir])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_config_that_is_not_a_file_is_named(command_line, tmp_path, command, make):
    folder = tmp_path / "hf"
    folder.mkdir()
    make(folder / "config.json")
    code, _, err = command_line(*command(folder, tmp_path / "made"))
    assert (code, f"{folder}/config.json" in err) == (2, True), err
    assert not (tmp_path / "made").exists()
