"""Names of projections against those of Megatron's layers, and of transformers' modules."""

import pytest
from megatron.inference.packed.projections import projections


def layers(*modules, **kind):
    shapes = {f"{module}.weight": (8, 4) for module in modules}
    return {one.module: one.layer for one in projections(shapes, **kind).values()}


def test_the_parts_of_a_layer_of_megatrons_name_it_together():
    block = "model.layers.7.self_attn"
    names = [f"{block}.{part}_proj.weight" for part in "qkvo"]
    others = (f"{block}.q_norm.weight", "model.embed_tokens.weight")
    found = projections(dict.fromkeys([*names, *others], (8, 4)))
    assert list(found) == sorted(names)
    query = found[f"{block}.q_proj.weight"]
    assert query.layer == "decoder.layers.7.self_attention.linear_qkv"
    assert query.parts == tuple(f"{block}.{part}_proj" for part in "qkv")
    assert query.has_heads
    assert found[f"{block}.o_proj.weight"].parts == (f"{block}.o_proj",)


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("self_attn.q_proj", "self_attention.linear_q_proj"),
        ("self_attn.kv_a_proj_with_mqa", "self_attention.linear_kv_down_proj"),
        ("self_attn.kv_b_proj", "self_attention.linear_kv_up_proj"),
        ("mlp.down_proj", "mlp.linear_fc2"),
        ("mlp.experts.12.down_proj", "mlp.experts.local_experts.12.linear_fc2"),
        ("mlp.shared_experts.down_proj", "mlp.shared_experts.linear_fc2"),
    ],
)
def test_a_layer_alone(module, layer):
    assert layers(f"model.layers.0.{module}") == {
        f"model.layers.0.{module}": f"decoder.layers.0.{layer}"
    }


def test_gate_and_up_are_one_and_a_router_is_none():
    block = "model.layers.1.mlp"
    found = layers(f"{block}.gate_proj", f"{block}.up_proj", f"{block}.gate", f"{block}.x_proj")
    assert found == dict.fromkeys(
        (f"{block}.gate_proj", f"{block}.up_proj"), "decoder.layers.1.mlp.linear_fc1"
    )
    assert layers("lm_head") == {"lm_head": "output_layer"}


def test_what_lacks_a_part_is_no_layer():
    assert layers("model.layers.1.mlp.gate_proj", "model.layers.0.self_attn.k_proj") == {}


def test_a_hybrid_model_has_two_layers_for_a_block():
    block = "model.layers.3"
    names = [f"{block}.self_attn.o_proj", f"{block}.mlp.down_proj", "lm_head"]
    assert list(layers(*names, is_hybrid=True).values()) == [
        "output_layer",
        "decoder.layers.7.mlp.linear_fc2",
        "decoder.layers.6.self_attention.linear_proj",
    ]
