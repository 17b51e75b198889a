"""Models of either class by their pattern of layers."""

import pytest
from mqo.megatron.run.gpt_blocks import as_gpt, given_pattern, gpt_name, gpt_pattern, hybrid_name

DENSE = {"num_layers": 2}
MIXED = {
    "num_layers": 3,
    "multi_latent_attention": True,
    "num_experts": 8,
    "moe_layer_freq": [0, 1, 1],
}


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (DENSE, "*-*-"),
        (MIXED, "+-+E+E"),
        (DENSE | {"moe_layer_freq": [1, 1]}, "*-*-"),  # without experts it has no effect
        (DENSE | {"num_experts": 4, "moe_layer_freq": 1}, "*E*E"),
        ({"num_layers": 4, "num_experts": 4, "moe_layer_freq": 2}, "*E*-*E*-"),
        (DENSE | {"num_experts": 4}, "*E*E"),
    ],
)
def test_a_gpt_has_the_pattern_of_its_blocks(args, pattern):
    assert gpt_pattern(args) == pattern
    layers = {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}
    assert gpt_pattern(as_gpt(args | layers)) == pattern


def test_a_hybrid_model_is_described_as_the_gpt_with_its_blocks():
    hybrid = {"hybrid_layer_pattern": "+-|+E+E", "num_layers": 6, "hidden_size": 64}
    gpt = as_gpt(hybrid | {"multi_latent_attention": True, "num_experts": 8, "moe_layer_freq": 1})
    assert given_pattern(hybrid) == "+-+E+E"
    assert given_pattern(gpt) is None
    assert gpt == {**MIXED, "hidden_size": 64, "hybrid_layer_pattern": None} | {
        "hybrid_override_pattern": None
    }


def test_a_gpt_stays_as_it_is():
    assert as_gpt(MIXED) == MIXED
    assert given_pattern({"hybrid_layer_pattern": None} | MIXED) is None


@pytest.mark.parametrize("pattern", ["*-*", "-*", "*--", "M*-", "**--", "*-E"])
def test_other_layers_than_those_of_blocks_are_no_gpt(pattern):
    with pytest.raises(ValueError, match="no GPT"):
        as_gpt({"hybrid_layer_pattern": pattern, "num_layers": len(pattern)})


NAMES = {
    "decoder.layers.1.input_layernorm.weight": "decoder.layers.2.input_layernorm.weight",
    "decoder.layers.1.self_attention.linear_qkv.weight": (
        "decoder.layers.2.self_attention.linear_qkv.weight"
    ),
    "optimizer.state.exp_avg.decoder.layers.1.mlp.router.weight": (
        "optimizer.state.exp_avg.decoder.layers.3.mlp.router.weight"
    ),
    "decoder.layers.10.pre_mlp_layernorm.weight": "decoder.layers.21.pre_mlp_layernorm.weight",
    "decoder.final_layernorm.weight": "decoder.final_norm.weight",
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_that_of_the_layer_of_a_block(name):
    assert hybrid_name(name) == NAMES[name]
    assert gpt_name(NAMES[name], {n: n // 2 for n in range(22)}) == name
