"""`mqo export`, with the real program, on a folder of transformers'."""

import json
import re
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")
from mqo.launch import export  # noqa: E402
from mqo.launch.export import READERS  # noqa: E402

from ...small_llama import small_llama  # noqa: E402
from ..odd_files import ODD  # noqa: E402


@pytest.fixture
def model(tmp_path):
    """A small model with random weights, with a file of a tokenizer beside."""
    small_llama(num_hidden_layers=1).bfloat16().save_pretrained(tmp_path / "a model")
    (tmp_path / "a model" / "tokenizer.json").write_text("{}")
    return tmp_path / "a model"


def test_the_layouts_are_those_of_the_program():
    from megatron.inference.packed.layouts import LAYOUTS

    assert list(LAYOUTS) == list(READERS)


def loaded(folder):
    with torch.no_grad():
        made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return made(torch.arange(6).reshape(1, 6)).logits


def test_a_folder_is_packed_and_says_who_reads_it(command_line, model, tmp_path):
    target = tmp_path / "made" / "packed"
    code, out, err = command_line("export", model, target, "--format", "nvfp4")
    assert code == 0, err
    assert out.startswith(f"{target}\n7 weight matrices in nvfp4")
    assert "\nlayout compressed-tensors, nvfp4-pack-quantized\nread by: transformers" in out
    assert {path.name for path in target.iterdir()} == {path.name for path in model.iterdir()}
    said = json.loads((target / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    size, before = ((place / "model.safetensors").stat().st_size for place in (target, model))
    assert size < before / 2
    pytest.importorskip("compressed_tensors")
    assert loaded(target).isfinite().all()


def test_the_reader_in_the_folder_needs_nothing_of_ours(command_line, model, tmp_path):
    (model / "README.md").write_text("# A model\n")
    target, full = tmp_path / "made", tmp_path / "in full"
    code, out, err = command_line("export", model, target, "--format", "hif4")
    assert code == 0, err
    assert re.search(r"layout mqo \(not compressed-tensors: .* hif4\)", out)
    page = (target / "README.md").read_text()
    assert page.startswith("# A model\n")
    assert "7 weight matrices in hif4" in page
    with pytest.raises(OSError, match=r"model\.safetensors"):  # no random weights in their place
        loaded(target)
    command = [sys.executable, "-I", target / "dequantize.py", target, full]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert not (full / "dequantize.py").exists()
    assert not loaded(full).equal(loaded(model))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "int3"), "There is no type to export called 'int3'"),
        (("--format", "hif4", "--layout", "gguf"), "There is no layout called 'gguf'"),
        (("--format", "hif4", "--layout", "fp8"), "does not store hif4. Expected: --layout mqo"),
        ((), "a run, or --format TYPE"),
        (("--format", "mxfp4", "--dtype", "bf16"), "whose dtype stays"),
        (("--format", "mxfp4", "--dtype", "fp64"), "fp64"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(command_line, model, tmp_path, words, said):
    code, _, err = command_line("export", model, tmp_path / "made", *words)
    assert (code, said in err) == (2, True)
    assert not (tmp_path / "made").exists()


def test_types_of_a_quantizer_of_the_user_have_no_codes(command_line, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "call", None)
    run = tmp_path / "a run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    (run / "quant.toml").write_text(
        '[asked]\nfprop = "mine"\n[plugins.mine]\nfile = "plugins/mine/mine.py"\n'
    )
    code, _, err = command_line("export", run, tmp_path / "made")
    assert (code, "trained with mine in Python" in " ".join(err.split())) == (2, True), err
    assert "--format TYPE" in err
    assert not (tmp_path / "made").exists()


def test_a_target_that_is_there_and_a_source_without_weights_are_refused(
    command_line, model, tmp_path
):
    code, _, err = command_line("export", model, model, "--format", "mxfp4")
    assert (code, f"{model} already exists" in " ".join(err.split())) == (2, True)
    (tmp_path / "empty").mkdir()
    code, _, err = command_line("export", tmp_path / "empty", tmp_path / "x", "--format", "mxfp4")
    assert code == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "merges.txt", "chat_template.jinja", "README.md"]
)
def test_a_file_that_cannot_be_copied_is_named_before_the_weights_are_packed(
    command_line, model, tmp_path, monkeypatch, name, make
):
    monkeypatch.setattr(export, "call", None)
    (model / name).unlink(missing_ok=True)
    make(model / name)
    code, _, err = command_line("export", model, tmp_path / "made", "--format", "mxfp4")
    assert (code, f"{model}/{name}" in err) == (2, True), err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("count", [10**9, 2, "1", 0])
def test_layers_that_the_weights_lack_are_refused(command_line, model, tmp_path, count):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": count}))
    code, _, err = command_line("export", model, tmp_path / "made", "--format", "mxfp4")
    assert (code, f"num_hidden_layers = {count!r}, " in err) == (2, True), err
    assert not (tmp_path / "made").exists()


def test_no_code_and_no_reference_to_it_is_copied(command_line, model, tmp_path):
    kept = {"README.md": "a page", "LICENSE": "a license", "chat_template.jinja": "{{ x }}"}
    left = {"modeling.py": "import os", "notes": "n", "pytorch_model.bin": "x", ".hidden.py": ""}
    for name, text in (kept | left).items():
        (model / name).write_text(text)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = model / name
        table = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(table | {"auto_map": {"AutoConfig": "modeling.Config"}}))
    code, out, err = command_line("export", model, tmp_path / "made", "--format", "mxfp4")
    assert code == 0, err
    copied = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert kept.keys() <= copied.keys() and not left.keys() & copied.keys()
    assert not [name for name, content in copied.items() if b"auto_map" in content]
    assert all(name in out for name in left)
