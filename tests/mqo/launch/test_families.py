"""The families: config.json -> shape -> flags, and back; and the fields that are refused."""

import pytest
from mqo.errors import ConvertError
from mqo.launch.architecture import architecture_flags
from mqo.launch.families import FAMILIES, family_of_shape
from mqo.launch.hf_config import config_of, shape_of_config
from mqo.scale.layout import Layout
from mqo.scale.weights import rank_weights

COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
WINDOW = {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}
# The config.json of published models: {name: (keys, weights, flags)}. The weights are published.
PUBLISHED = {
    "Qwen2.5-0.5B": (
        COMMON
        | WINDOW
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "bos_token_id": 151643,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "vocab_size": 151936,
        },
        494_032_768,
        "--add-qkv-bias",
    ),
    "Qwen3-0.6B": (
        COMMON
        | WINDOW
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        596_049_920,
        "--kv-channels 128 --qk-layernorm",
    ),
    "Mistral-7B-v0.3": (
        COMMON
        | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32768,
        },
        7_248_023_552,
        "",
    ),
    "SmolLM2-135M": (
        COMMON
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
        134_515_008,
        "",
    ),
    "Qwen3-30B-A3B": (
        COMMON
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        30_532_122_624,
        "--kv-channels 128 --qk-layernorm",
    ),
    "Mixtral-8x7B-v0.1": (
        COMMON
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        46_702_792_704,
        "",
    ),
}
NAMES = tuple(PUBLISHED)
OWN_FLAGS = ("--add-qkv-bias", "--kv-channels", "--qk-layernorm")


def config(name, **changes):
    return PUBLISHED[name][0] | changes


def shape(name, **changes):
    return shape_of_config(config(name, **changes))


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_has_the_published_number_of_weights(name):
    weights = rank_weights(shape(name), Layout(1), 0)
    assert weights.dense + weights.expert == PUBLISHED[name][1]


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_has_the_flags_of_its_family(name):
    words = architecture_flags(shape(name), 4096)
    expected = PUBLISHED[name][2].split()
    assert {flag for flag in OWN_FLAGS if flag in words} == {*OWN_FLAGS} & {*expected}
    assert " ".join(expected[:2]) in " ".join(words)


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_comes_back_from_its_own_config(name):
    again = config_of(shape(name), "bf16", 4096)
    assert shape_of_config(again) == shape(name)
    family = FAMILIES[again["architectures"][0]]
    # Mistral without a window is the function of Llama, and is written as such.
    expected = config(name)["architectures"][0].replace("Mistral", "Llama")
    assert (family.architecture, again["model_type"]) == (expected, family.model_type)
    kept = {key: value for key, value in config(name).items() if key in again}
    same = {"torch_dtype", "max_position_embeddings", "architectures", "model_type"}
    assert {key: again[key] for key in kept if key not in same} == {
        key: value for key, value in kept.items() if key not in same
    }


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Qwen2.5-0.5B", {"use_sliding_window": True}),
        ("Qwen2.5-0.5B", {"use_mrope": True}),
        ("Qwen2.5-0.5B", {"layer_types": ["sliding_attention"] * 24}),
        ("Qwen2.5-0.5B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("Qwen2.5-0.5B", {"hidden_act": "gelu"}),
        ("Qwen3-0.6B", {"attention_bias": True}),
        ("Qwen3-0.6B", {"use_sliding_window": True}),
        ("Qwen3-0.6B", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("Mistral-7B-v0.3", {"sliding_window": 4096}),
        ("Mixtral-8x7B-v0.1", {"sliding_window": 4096}),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [5]}),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}),
        ("Qwen3-30B-A3B", {"num_local_experts": 64}),
        ("SmolLM2-135M", {"sliding_window": 4096}),
        ("SmolLM2-135M", {"attention_bias": True}),
        ("SmolLM2-135M", {"logit_scale": 2.0}),
    ],
)
def test_a_key_that_flags_cannot_express_is_refused_by_name(name, change):
    (key, value) = next(iter(change.items()))
    expected = {"rope_scaling": "rope_type = 'yarn'"}.get(key, key)
    with pytest.raises(ConvertError, match=expected):
        shape(name, **{key: value})


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Olmo2ForCausalLM"])
def test_another_architecture_is_refused_with_the_list(architecture):
    with pytest.raises(ConvertError, match=f"{architecture}.*Qwen3ForCausalLM"):
        shape("Qwen3-0.6B", architectures=[architecture])


def test_a_missing_key_has_the_default_of_its_class():
    def without(name, key):
        return {k: v for k, v in config(name).items() if k != key}

    assert shape_of_config(without("Qwen3-0.6B", "head_dim")).head_size == 128
    assert shape_of_config(without("SmolLM2-135M", "num_key_value_heads")).num_query_groups == 9
    with pytest.raises(ConvertError, match="sliding_window = 4096"):
        shape_of_config(without("Mistral-7B-v0.3", "sliding_window"))


def test_layers_with_full_attention_are_accepted():
    layers = ["full_attention"] * 28
    assert shape("Qwen3-0.6B", layer_types=layers) == shape("Qwen3-0.6B")


def test_a_shape_that_no_family_has_is_named():
    both = shape("Qwen3-0.6B").model_copy(update={"qkv_bias": True})
    with pytest.raises(ConvertError, match="qkv_bias and qk_norm"):
        family_of_shape(both)
