"""`--from FOLDER`: the model, the tokenizer and the checkpoint that it implies."""

import json
from types import SimpleNamespace

import pytest
import torch
from mqo.errors import ConvertError, MqoError
from mqo.launch import arguments, start_weights
from mqo.launch.convert import Converted
from mqo.launch.start_weights import FLAG, checkpoint_of, ready_weights
from mqo.project import Project
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def folder(tmp_path):
    """Weights, as far as they are read before a conversion."""
    path = tmp_path / "little"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.zeros(4)}, path / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "barley"}\n' * 4)
    return path


def config(*words):
    own, extra = arguments.split_flags([*map(str, words), "--training-config", "tiny"])
    args = arguments.parser().parse_intermixed_args(own)
    return arguments.config_from(args, extra)


def test_a_run_has_the_model_and_the_weights_of_the_folder(folder, text):
    experiment = config("--from", folder, "--text", text, "--mode", "bf16").experiment
    assert (experiment.model.hidden_size, experiment.model.num_layers) == (64, 2)
    assert experiment.model_name == "little"
    assert experiment.extra_flags == (FLAG, str(checkpoint_of(Project.here(), folder)))
    assert (experiment.start, experiment.tokenizer) == (folder, folder)


def test_other_weights_are_another_checkpoint(folder):
    before = checkpoint_of(Project.here(), folder)
    assert before == checkpoint_of(Project.here(), folder)
    save_file({"a": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
    assert checkpoint_of(Project.here(), folder) != before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--model", "llama32-1b", "--text", "{text}"), "--model llama32-1b"),
        (("--shrink", "2,1", "--text", "{text}"), "--shrink"),
        (("--text", "{text}", "--", FLAG, "elsewhere"), FLAG),
        (("--text", "{text}", "--", "--num-layers", "1"), "--num-layers"),
    ],
)
def test_options_that_contradict_the_folder_are_refused(folder, text, words, named):
    with pytest.raises(MqoError, match=named):
        config("--from", folder, "--mode", "bf16", *(word.format(text=text) for word in words))


def test_the_tokenizer_of_the_weights_is_needed(folder, text):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MqoError, match=r"tokenizer\.json"):
        config("--from", folder, "--text", text, "--mode", "bf16")
    given = folder.with_name("words")
    given.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (given / name).write_text("{}")
    words = ("--from", folder, "--text", text, "--mode", "bf16", "--tokenizer", given)
    assert config(*words).experiment.tokenizer == given


def test_a_training_needs_data_with_the_tokenizer_of_the_weights(folder):
    args = arguments.parser().parse_args(["--from", str(folder)])
    with pytest.raises(MqoError, match="without data"):
        start_weights.check_data(args)


def test_a_folder_without_weights_is_refused(folder, text):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConvertError, match="little"):
        config("--from", folder, "--text", text, "--mode", "bf16")


def test_weights_are_converted_once(folder, tmp_path, monkeypatch):
    target, converted = tmp_path / "data/little", []
    experiment = SimpleNamespace(start=folder, checkpoint=None, extra_flags=(FLAG, str(target)))

    def convert(tree, source, target, report):
        converted.append(source)
        target.mkdir()
        return Converted(str(target), notes=(f"note {len(converted)}",))

    monkeypatch.setattr(start_weights, "hf_to_megatron", convert)
    for is_first in (True, False):
        lines = []
        ready_weights(experiment, tmp_path, lines.append)
        assert str(target) in lines[-1]
        assert any(line.endswith("note 1") for line in lines) == is_first
    assert converted == [folder]


def test_a_run_that_continues_does_not_read_the_weights(folder, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    lines, target = [], tmp_path / "data/little"
    flags = (FLAG, str(target))
    experiment = SimpleNamespace(start=folder, checkpoint=tmp_path, extra_flags=flags)
    ready_weights(experiment, tmp_path, lines.append)
    assert len(lines) == 1
    assert not target.parent.exists()
