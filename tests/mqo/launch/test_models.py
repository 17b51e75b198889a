"""The user's own models: from a config.json or a TOML, named, shrunk, and stored with the run."""

import json

import pytest
from mqo.errors import ConvertError, MqoError, UnknownNameError
from mqo.launch.config import RunConfig, resolve
from mqo.launch.models import expand_models, model_of, shrink_of
from mqo.launch.naming import folder_part
from mqo.matrix import tables

from .test_families import PUBLISHED

TOML = """
num_layers = 8
hidden_size = 512
ffn_hidden_size = 1024
num_attention_heads = 8
num_query_groups = 4
head_dim = 96
qk_norm = true
vocab_size = 4096
tied_embeddings = true
norm_epsilon = 1e-6
rotary_base = 10000
train_sequence = 128
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the config.json of Qwen3-0.6B."""
    result = tmp_path / "my-qwen"
    result.mkdir()
    (result / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-0.6B"][0]))
    return result


@pytest.fixture
def toml(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(TOML)
    return file


def test_a_folder_and_its_file_are_the_same_model(folder):
    (model, file), (again, _) = model_of(str(folder)), model_of(str(folder / "config.json"))
    assert model == again and file == folder / "config.json"
    assert (model.name, model.published_as, model.train_sequence) == ("my-qwen", None, 40960)
    assert (model.parameters, model.head_size, model.qk_norm) == (596_049_920, 128, True)


def test_a_relative_path_and_another_name(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert model_of("my-qwen")[0].name == "my-qwen"
    monkeypatch.chdir(folder)
    assert model_of(".")[0].name == "my-qwen"
    (folder / "small.json").write_text((folder / "config.json").read_text())
    assert model_of("small.json")[0].name == "small"
    assert model_of("small.json", "other")[0].name == "other"


def test_a_toml_has_the_keys_of_models_toml(toml):
    model, _ = model_of(str(toml))
    assert (model.name, model.head_size, model.train_sequence) == ("mine", 96, 128)
    attention = 512 * 96 * (8 + 4 + 4) + 8 * 96 * 512 + 2 * 96
    layer = attention + 3 * 512 * 1024 + 2 * 512
    assert model.parameters == 8 * layer + 4096 * 512 + 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TOML + "layers = 3\n", "layers"),
        (TOML.replace("train_sequence = 128", ""), "train_sequence"),
        (TOML.replace("hidden_size = 512", "hidden_size = 0"), "hidden_size"),
        (TOML.replace("num_query_groups = 4", ""), "num_query_groups"),
        ("num_layers = ", "mine.toml"),
    ],
)
def test_a_toml_of_no_model_is_refused(toml, text, message):
    toml.write_text(text)
    with pytest.raises(MqoError, match=message):
        model_of(str(toml))


def test_an_unknown_name_lists_names_and_kinds_of_files():
    with pytest.raises(UnknownNameError, match=r"llama32-1b.*config\.json"):
        model_of("llama4")
    with pytest.raises(MqoError, match="does not exist"):
        model_of("no/such/folder")
    assert model_of("llama32-1b") == (tables.models()["llama32-1b"], None)


def test_a_key_that_cannot_be_expressed_is_named(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(ConvertError, match="attention_bias = True"):
        model_of(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(MqoError, match=r"config\.json"):
        model_of(str(folder))


def test_an_own_model_needs_a_name_for_folders_that_no_published_one_has(folder):
    for name in ("llama32-1b", "my qwen"):
        renamed = folder.rename(folder.with_name(name))
        with pytest.raises(MqoError, match=name):
            model_of(str(renamed))
        assert model_of(str(renamed), "fine")[0].name == "fine"
        renamed.rename(folder)


def test_a_list_of_models_may_have_paths(folder, toml):
    assert expand_models("all") == [*tables.script_models()]
    assert expand_models("nemotron*") == ["nemotron-h-8b"]
    assert expand_models(f"llama*,{toml}") == ["llama32-1b", "llama31-8b", str(toml)]
    with pytest.raises(UnknownNameError):
        expand_models("lama")


def test_a_run_keeps_the_whole_shape_without_the_file(folder):
    config = resolve(str(folder), "wikipedia", "mxfp4", "smoke")
    text = config.model_dump_json()
    (folder / "config.json").unlink()
    again = RunConfig.model_validate_json(text).experiment
    assert again == config.experiment
    assert (again.model_name, again.model_file) == ("my-qwen", folder / "config.json")
    small = again.model
    assert (small.num_layers, small.hidden_size, small.num_attention_heads) == (7, 128, 4)
    assert (small.num_query_groups, small.head_size, small.qk_norm) == (2, 64, True)


def test_flags_that_an_own_model_has_are_no_changes(folder):
    flags = ("--qk-layernorm", "--kv-channels", "64")
    assert not resolve(str(folder), "wikipedia", "bf16", "smoke", extra_flags=flags).experiment.name
    changed = resolve(str(folder), "wikipedia", "bf16", "smoke", extra_flags=("--add-qkv-bias",))
    assert changed.experiment.model_name == "my-qwen*"


def test_shrink_takes_the_place_of_the_training_configuration(folder):
    def experiment(**rest):
        return resolve("llama32-1b", "wikipedia", "bf16", "smoke", **rest).experiment

    usual, small = experiment(), experiment(shrink=(4, 2))
    assert experiment(shrink=(8, 4)) == usual
    assert (small.model.hidden_size, small.model.num_layers) == (512, 8)
    assert (usual.model_name, small.model_name) == ("llama32-1b", "llama32-1b-w4d2")
    assert folder_part(small.model_name) == small.model_name
    assert experiment(shrink=(1, 1)).model == tables.models()["llama32-1b"]


@pytest.mark.parametrize("text", ["", "4", "4,", "0,1", "4,2,1", "a,b", "-1,2"])
def test_a_shrink_is_two_numbers(text):
    with pytest.raises(MqoError, match="--shrink"):
        shrink_of(text)
    assert shrink_of(" 4, 2") == (4, 2)


@pytest.mark.parametrize(
    ("shrink", "message"),
    [
        ((3, 1), "hidden_size is 512"),
        ((64, 1), "size of a head is 96"),
        ((1, 16), "8 layers"),
    ],
)
def test_a_size_that_cannot_be_divided_is_named(toml, shrink, message):
    with pytest.raises(MqoError, match=message):
        model_of(str(toml))[0].shrunk(*shrink)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("shrink", [(8, 4), (4, 2), (2, 1)])
def test_a_shrunk_model_keeps_its_attention(name, shrink, tmp_path):
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(PUBLISHED[name][0]))
    full = model_of(str(file))[0]
    small = full.shrunk(*shrink)
    assert small.hidden_size * shrink[0] == full.hidden_size
    ratio = full.num_attention_heads // full.num_query_groups
    assert small.num_attention_heads == ratio * small.num_query_groups
    assert small.num_query_groups > 1 and small.head_size % 2 == 0
    assert small.heads_size * shrink[0] == full.heads_size
    assert (small.qk_norm, small.qkv_bias) == (full.qk_norm, full.qkv_bias)
