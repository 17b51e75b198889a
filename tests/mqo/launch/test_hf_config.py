"""Shapes from config.json and from a checkpoint's arguments, and back."""

import pytest
from mqo.errors import ConvertError
from mqo.launch.families import FAMILIES
from mqo.launch.hf_config import (
    config_of,
    dtype_of_args,
    known_keys,
    shape_of_args,
    shape_of_config,
)
from mqo.matrix import tables

from .conftest import published_shape

MODELS = tuple(tables.script_models())


def config(model):
    return config_of(published_shape(model), "bf16", 4096)


def args(model):
    """What upstream's parser makes of the model's flags, as far as it is read here."""
    of = published_shape(model)
    found = {
        "num_layers": of.num_layers,
        "hidden_size": of.hidden_size,
        "ffn_hidden_size": of.ffn_hidden_size,
        "num_attention_heads": of.num_attention_heads,
        "group_query_attention": of.mla is None,
        "num_query_groups": of.num_query_groups,
        "kv_channels": of.hidden_size // of.num_attention_heads,
        "vocab_size": of.vocab_size,
        "padded_vocab_size": of.vocab_size + 96,
        "untie_embeddings_and_output_weights": not of.tied_embeddings,
        "layernorm_epsilon": of.norm_epsilon,
        "rotary_base": of.rotary_base,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
    }
    if of.mla is None:
        return found | {"use_rope_scaling": True, "rope_scaling_factor": float(of.rope.factor)}
    return found | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        **of.mla.model_dump(),
        "num_experts": 64,
        "moe_router_topk": 6,
        "moe_layer_freq": [0] + [1] * 26,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 2816,
        "moe_aux_loss_coeff": 0.001,
        "moe_router_pre_softmax": True,
    }


@pytest.mark.parametrize("model", MODELS)
def test_a_shape_comes_back_from_its_config(model):
    assert shape_of_config(config(model)) == published_shape(model)


@pytest.mark.parametrize("model", MODELS)
def test_a_shape_comes_back_from_its_arguments(model):
    assert shape_of_args(args(model)) == published_shape(model)


def test_a_config_says_what_transformers_reads():
    made = config("llama32-1b")
    assert (made["architectures"], made["torch_dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert (made["num_key_value_heads"], made["head_dim"]) == (8, 64)
    assert made["rope_scaling"]["rope_type"] == "llama3"
    made = config("deepseek2_lite")
    assert (made["qk_nope_head_dim"], made["q_lora_rank"]) == (128, None)
    assert made["max_position_embeddings"] == 4096


@pytest.mark.parametrize("model", MODELS)
def test_transformers_takes_the_config(model, tmp_path):
    """In its own terms: the newer form, with the base among the rotary parameters."""
    transformers = pytest.importorskip("transformers")
    kind = {"llama": transformers.LlamaConfig, "deepseek_v2": transformers.DeepseekV2Config}
    made = kind[config(model)["model_type"]](**config(model))
    made.save_pretrained(tmp_path)
    read = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert read["rope_parameters"]["rope_theta"] == published_shape(model).rotary_base
    assert shape_of_config(read) == published_shape(model)


def test_without_scaling_there_is_none():
    plain = config("llama31-8b") | {"rope_scaling": None, "num_key_value_heads": None}
    found = shape_of_config(plain)
    assert (found.rope, found.num_query_groups) == (None, 32)
    assert config_of(found, "fp32", 8)["rope_scaling"] is None
    unscaled = args("llama31-8b") | {"use_rope_scaling": False}
    assert shape_of_args(unscaled).rope is None
    unscaled = args("deepseek2_lite") | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    assert shape_of_args(unscaled).rope is None


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("llama31-8b", {"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel"),
        ("llama31-8b", {"architectures": None}, r"architecture \(none\)"),
        ("llama31-8b", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama31-8b", {"attention_bias": True}, "attention_bias = True"),
        ("llama31-8b", {"head_dim": 96.5}, "head_dim 96.5"),
        ("llama31-8b", {"rope_scaling": {"rope_type": "linear"}}, "rope_type = 'linear'"),
        ("llama31-8b", {"hidden_size": 4096.5}, "hidden_size 4096.5"),
        ("deepseek2_lite", {"q_lora_rank": 1536}, "q_lora_rank = 1536"),
        ("deepseek2_lite", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ("deepseek2_lite", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("deepseek2_lite", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek2_lite", {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
    ],
)
def test_what_a_config_says_and_flags_cannot_is_refused(model, change, message):
    with pytest.raises(ConvertError, match=message):
        shape_of_config(config(model) | change)


ROPE = {"llama31-8b": "llama3", "deepseek2_lite": "yarn"}


@pytest.mark.parametrize("model", ROPE)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_factor": 0.5}, "attention_factor = 0.5"),
        ({"truncate": False}, "truncate = False"),
        ({"truncate": 0}, "truncate = 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"finetuned": True}, "finetuned = True"),
    ],
)
@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_a_key_of_the_scaling_is_read_or_refused(model, change, message, form):
    made = config(model)
    rope = made.pop("rope_scaling") | {"rope_theta": made["rope_theta"]}
    assert shape_of_config(made | {form: rope}) == published_shape(model)
    with pytest.raises(ConvertError, match=message):
        shape_of_config(made | {form: rope | change})


@pytest.mark.parametrize(
    ("mscale", "all_dim", "fits"),
    [(1, 0, True), (1, 1, True), (0.5, 2, True), (0.707, 0, False), (0, 1, False), (0, 0, False)],
)
def test_mscales_that_transformers_computes_otherwise_are_refused(mscale, all_dim, fits):
    made = config("deepseek2_lite")
    made["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": all_dim}
    if fits:
        assert shape_of_config(made).rope.mscale_all_dim == all_dim
    else:
        with pytest.raises(ConvertError, match="mscale_all_dim"):
            shape_of_config(made)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},
        {"partial_rotary_factor": 0.5},
        {"original_max_position_embeddings": 2048},
        {"layer_types": ["full_attention"]},
        {"use_qk_norm": False},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "mistral"},
        {"rope_parameters": {"rope_theta": 1.0}},
    ],
)
def test_a_key_that_is_not_known_is_refused_unless_it_is_null(model, change):
    (name,) = change
    with pytest.raises(ConvertError, match=name):
        shape_of_config(config(model) | change)
    if name != "model_type":
        assert shape_of_config(config(model) | {name: None}) == published_shape(model)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_keys_that_transformers_writes_are_known(family):
    """Those of save_pretrained, and those that it leaves out at their default."""
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(family.model_type)
    assert made.to_dict().keys() - known_keys(family) == set()


def test_the_keys_of_the_published_models_are_known():
    """Those in the config.json of DeepSeek-V2-Lite, Llama-3.2-1B and SmolLM2 on the hub."""
    deepseek = "attention_bias auto_map aux_loss_alpha ep_size moe_layer_freq pretraining_tp "
    deepseek += "scoring_func seq_aux topk_group topk_method torch_dtype rope_scaling rope_theta"
    assert set(deepseek.split()) <= known_keys(FAMILIES["DeepseekV2ForCausalLM"])
    llama = "_name_or_path attention_dropout head_dim mlp_bias pretraining_tp rope_theta"
    llama += " is_llama_config rope_interleaved transformers.js_config use_cache"
    assert set(llama.split()) <= known_keys(FAMILIES["LlamaForCausalLM"])


def test_another_end_of_the_scaling_is_refused():
    made = config("llama31-8b")
    made["rope_scaling"] |= {"original_max_position_embeddings": 4096}
    with pytest.raises(ConvertError, match="original=4096"):
        shape_of_config(made)


def test_a_missing_field_is_named():
    made = config("llama31-8b")
    del made["num_hidden_layers"]
    with pytest.raises(ConvertError, match=r"config\.json .*'num_hidden_layers'"):
        shape_of_config(made)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("deepseek2_lite", {"moe_layer_freq": [1] * 26 + [0]}, r"layers \[1, 1, .*1, 0\]"),
        ("deepseek2_lite", {"moe_shared_expert_intermediate_size": 2000}, "shared .* 2000 .* 1408"),
        ("deepseek2_lite", {"mscale_all_dim": 0.0}, "mscale_all_dim = 0.0"),
        ("deepseek2_lite", {"mscale": 0.0}, "mscale = 0.0"),
        ("deepseek2_lite", {"layernorm_epsilon": 1e-5}, "layernorm_epsilon = 1e-05"),
        ("deepseek2_lite", {"rope_type": "rope"}, "rotary_scaling_factor = 40.0"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(model, change, message):
    with pytest.raises(ConvertError, match=message):
        shape_of_args(args(model) | change)


def test_a_vocabulary_that_only_the_tokenizer_knew_counts_with_its_padding():
    found = shape_of_args(args("llama31-8b") | {"vocab_size": None})
    assert found.vocab_size == 128256 + 96


def test_the_dtype_is_that_of_the_arguments():
    assert dtype_of_args({"bf16": True, "fp16": False}) == "bf16"
    assert dtype_of_args({"bf16": False, "fp16": True}) == "fp16"
    assert dtype_of_args({}) == "fp32"
