"""`mqo export`, with the real program, on a folder of transformers'."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
from mqo.launch.export import LAYOUTS  # noqa: E402


@pytest.fixture
def model(tmp_path):
    """A small model with random weights, with a file of a tokenizer beside."""
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
    )
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(tmp_path / "a model")
    (tmp_path / "a model" / "tokenizer.json").write_text("{}")
    return tmp_path / "a model"


def test_the_layouts_are_those_of_the_program():
    from megatron.inference import packed

    assert {name: one.name for name, one in packed.LAYOUTS.items()} == LAYOUTS


def test_a_folder_is_packed_and_says_who_reads_it(command_line, model, tmp_path):
    target = tmp_path / "made" / "packed"
    code, out, err = command_line("export", model, target, "--format", "nvfp4")
    assert code == 0, err
    assert out.startswith(f"{target}\nnvfp4 as nvfp4-pack-quantized: transformers")
    names = {path.name for path in target.iterdir()}
    assert names == {path.name for path in model.iterdir()}
    said = json.loads((target / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    size, before = ((place / "model.safetensors").stat().st_size for place in (target, model))
    assert size < before / 2
    pytest.importorskip("compressed_tensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    with torch.no_grad():
        assert loaded(torch.arange(6).reshape(1, 6)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "int3"), "There is no type to export called 'int3'"),
        (("--format", "mxfp4", "--dtype", "bf16"), "whose dtype stays"),
        (("--format", "mxfp4", "--dtype", "fp64"), "fp64"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(command_line, model, tmp_path, words, said):
    code, _, err = command_line("export", model, tmp_path / "made", *words)
    assert (code, said in err) == (2, True)
    assert not (tmp_path / "made").exists()


def test_a_target_that_is_there_and_a_source_without_weights_are_refused(
    command_line, model, tmp_path
):
    code, _, err = command_line("export", model, model, "--format", "mxfp4")
    assert (code, "is there already" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    code, _, err = command_line("export", tmp_path / "empty", tmp_path / "x", "--format", "mxfp4")
    assert code == 2
    assert not (tmp_path / "x").exists()
