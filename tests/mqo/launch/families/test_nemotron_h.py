"""Nemotron-H: its config.json, the arguments of its checkpoints, and what is refused."""

import pytest
from mqo.errors import ConvertError
from mqo.launch import convert
from mqo.launch.families.nemotron_h import LEAST_STEP, NEMOTRON_H
from mqo.launch.hf_config import config_of, notes_on, shape_of_args, shape_of_config
from mqo.launch.published_args import check_published
from mqo.matrix import tables

from ..conftest import published_shape

MODEL = tables.models()["nemotron-h-8b"]
SHAPE = published_shape("nemotron-h-8b")
# Keys that older files have in addition to those that are written.
OLDER = {
    "attention_head_dim": 128,
    "chunk_size": 128,
    "hidden_dropout": 0.0,
    "num_logits_to_keep": 1,
    "rescale_prenorm_residual": True,
    "rms_norm_eps": 1e-5,
    "time_step_limit": [0.0, float("inf")],
    "time_step_min": 0.001,
    "use_mamba_kernels": True,
}
SYMBOLS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
ARGS = {
    "hidden_size": 4096,
    "ffn_hidden_size": 21504,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 128,
    "padded_vocab_size": 131072,
    "untie_embeddings_and_output_weights": True,
    "layernorm_epsilon": 1e-5,
    "rotary_base": 10000,
    "hybrid_layer_pattern": "|".join([MODEL.pattern[:26], MODEL.pattern[26:]]),
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_state_dim": 128,
    "squared_relu": True,
    "swiglu": False,
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
PARSER = {"hybrid_layer_pattern": {"flag": "--hybrid-layer-pattern", "default": None}}


def config(**changes):
    return config_of(SHAPE, "bf16", 8192) | changes


def test_a_shape_comes_back_from_its_config():
    assert shape_of_config(config()) == SHAPE
    assert shape_of_config(config(**OLDER)) == SHAPE


def test_transformers_takes_the_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.NemotronHConfig(**config()).save_pretrained(tmp_path)
    read = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert shape_of_config(read) == SHAPE


def test_a_missing_size_is_that_of_the_class():
    kept = ("architectures", "model_type", "hybrid_override_pattern", "intermediate_size")
    sizes = ("hidden_size", "num_attention_heads", "vocab_size")
    assert shape_of_config({key: config()[key] for key in (*kept, *sizes)}) == SHAPE


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_the_pattern_may_be_a_list(key):
    listed = [SYMBOLS[symbol] for symbol in MODEL.pattern]
    assert shape_of_config(config(hybrid_override_pattern=None, **{key: listed})) == SHAPE
    assert shape_of_config(config(**{key: listed})) == SHAPE
    with pytest.raises(ConvertError, match=key):
        shape_of_config(config(**{key: listed[1:]}))


@pytest.mark.parametrize(
    "change",
    [
        {"hybrid_override_pattern": "M-ME*-"},
        {"hybrid_override_pattern": "*-*-"},
        {"hybrid_override_pattern": None},
        {"num_hidden_layers": 51},
        {"attention_head_dim": 64},
        {"mlp_hidden_act": "silu"},
        {"layer_norm_epsilon": 1e-6},
        {"time_step_min": 0.01},
        {"time_step_min": -1},
        {"conv_kernel": 3},
        {"use_bias": True},
        {"num_nextn_predict_layers": 1},
        {"tie_word_embeddings": True},
        {"sliding_window": 512},
        {"mamba_n_groups": 4},
        {"n_groups": 3},
    ],
)
def test_what_megatron_does_not_compute_is_refused_by_name(change):
    (key,) = change
    with pytest.raises(ConvertError, match="num_groups" if key == "n_groups" else key):
        shape_of_config(config(**change))


def test_a_minimum_of_step_sizes_is_said():
    assert notes_on(config()) == ()
    assert config()["time_step_min"] == LEAST_STEP
    (note,) = notes_on(config(time_step_min=0.001))
    assert "time_step_min = 0.001" in note
    assert notes_on({**config(), "time_step_min": 0.0}) == ()


def test_a_shape_comes_back_from_its_arguments():
    check_published(ARGS, PARSER)
    assert shape_of_args(ARGS) == SHAPE


@pytest.mark.parametrize(
    "change",
    [{"swiglu": True}, {"squared_relu": False}, {"position_embedding_type": "rope"}],
)
def test_a_checkpoint_that_transformers_cannot_express_is_refused(change):
    with pytest.raises(ConvertError, match=next(iter(change))):
        check_published(ARGS | change, PARSER)


def test_a_checkpoint_with_another_epsilon_or_with_tied_embeddings_is_refused():
    with pytest.raises(ConvertError, match="layernorm_epsilon"):
        shape_of_args(ARGS | {"layernorm_epsilon": 1e-6})
    tied = shape_of_args(ARGS | {"untie_embeddings_and_output_weights": False})
    with pytest.raises(ConvertError, match="mamba"):
        config_of(tied, "bf16", 8192)


def test_only_a_conversion_takes_mamba_layers(monkeypatch, tmp_path):
    facts = {"arguments": ARGS, "parser": {"mtp": {"flag": "--mtp", "default": None}}}
    monkeypatch.setattr(convert, "call", lambda *rest, **named: facts)
    assert convert.published_args(tmp_path, tmp_path, takes_mamba=True)[0] == ARGS
    with pytest.raises(ConvertError, match=r"Mamba layers.*mqo convert"):
        convert.published_args(tmp_path, tmp_path)


def test_export_refuses_a_folder_with_mamba_layers(command_line, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
    sizes |= {"vocab_size": 64, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2}
    made = transformers.NemotronHConfig(**sizes, hybrid_override_pattern="M-*-", ssm_state_size=8)
    transformers.NemotronHForCausalLM(made).save_pretrained(tmp_path / "model")
    target = tmp_path / "packed"
    code, _, err = command_line("export", tmp_path / "model", target, "--format", "nvfp4")
    assert (code, target.exists()) == (2, False)
    assert "Mamba layers" in err


def test_the_family_is_not_that_of_a_gpt():
    assert NEMOTRON_H.expresses(SHAPE)
    assert not NEMOTRON_H.expresses(SHAPE.model_copy(update={"activation": "swiglu"}))
