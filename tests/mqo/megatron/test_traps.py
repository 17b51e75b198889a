"""Each way to ask for a type and quantize nothing fires, with what to change."""

from dataclasses import replace

import pytest
from mqo.megatron.traps import Setup, find_traps, notes
from mqo.quant.labels import Layer

LINEAR = Layer("decoder.layers.0.mlp.linear_fc1", "linear", "ColumnParallelLinear")
HEAD = Layer("output_layer", "linear", "ColumnParallelLinear")
ATTENTION = Layer("decoder.layers.0.self_attention.core", "attention", "DotProductAttention")
ROUTER = Layer("decoder.layers.0.mlp.router", "router", "TopKRouter", sited=False)
SOUND = [LINEAR, HEAD, ATTENTION, ROUTER]
ALL = dict.fromkeys(("fprop", "dgrad", "wgrad", "qk", "pv"), "mxfp8")


def traps(asked=ALL, setup=None, layers=SOUND, excluded=()):
    return find_traps(asked, setup or Setup(), layers, lambda site, layer: layer in excluded)


def test_a_sound_run_has_none():
    assert traps() == []


@pytest.mark.parametrize("site", ALL)
def test_another_transformer_implementation(site):
    (text,) = traps({site: "mxfp8"}, Setup(transformer_impl="inference_optimized"))
    assert "--transformer-impl inference_optimized: its layers do not call the sites" in text
    assert "pass --transformer-impl local" in text


def test_transformer_engines_layers_are_as_good_as_they_ask():
    setup = Setup(transformer_impl="transformer_engine")
    assert traps(ALL, setup) == []
    setup = replace(setup, engine_faults=("one", "two"))
    assert traps({"wgrad": "mxfp8"}, setup) == ["one", "two"]
    assert traps({"qk": "mxfp8"}, setup) == []  # whose GEMMs are the attention's


def test_another_attention():
    setup = Setup(attention_variant="dsa")
    (text,) = traps({"pv": "mxfp4"}, setup)
    assert text.startswith("--experimental-attention-variant dsa: ")
    assert traps({"fprop": "mxfp4"}, setup) == []


def test_a_deferred_embedding_wgrad():
    setup = Setup(deferred_embedding_wgrad=True)
    (text,) = traps({"fprop": "mxfp8", "wgrad": "mxfp8"}, setup)
    assert text.startswith("--defer-embedding-wgrad-compute: ") and "'wgrad:output_layer'" in text
    assert traps({"fprop": "mxfp8"}, setup) == []
    assert traps(ALL, setup, excluded=("output_layer",)) == []


def test_gathered_weights():
    (text,) = traps({"dgrad": "mxfp8"}, Setup(weight_shards=4))
    assert " 4 ranks" in text and "--tensor-parallel-num-weight-shards" in text
    assert traps({"qk": "mxfp8"}, Setup(weight_shards=4)) == []


@pytest.mark.parametrize("module", ["GroupedMLP", "TEColumnParallelGroupedLinear"])
def test_grouped_experts(module):
    experts = Layer("decoder.layers.0.mlp.experts.weight1", "other", module, sited=False)
    (text,) = traps(layers=[*SOUND, experts])
    assert text == (
        f"decoder.layers.0.mlp.experts.weight1 ({module}) bypasses the linear sites: "
        "leave out --moe-grouped-gemm"
    )
    assert traps({"qk": "mxfp8"}, layers=[*SOUND, experts]) == []
    # Asked for by an argument, they are named once.
    (text,) = traps(setup=Setup(grouped_experts=True), layers=[*SOUND, experts])
    assert text.startswith("--moe-grouped-gemm: ")
    assert traps({"qk": "mxfp8"}, Setup(grouped_experts=True)) == []


def test_cuda_graphs():
    (text,) = traps({"qk": "mxfp8"}, Setup(cuda_graphs=True))
    assert text.startswith("--cuda-graph-impl: ")
    assert traps({"qk": "none"}, Setup(cuda_graphs=True)) == []


def test_frozen_weights():
    frozen = [Layer(f"layers.{i}.proj", "linear", "ColumnParallelLinear", True) for i in range(3)]
    (text,) = traps(layers=[*SOUND, *frozen])
    assert text.startswith("layers.0.proj (ColumnParallelLinear) and 2 more is frozen")
    assert "--freeze-all-layers" in text
    assert traps({"qk": "mxfp8"}, layers=[*SOUND, *frozen]) == []
    names = {layer.name for layer in frozen}
    assert traps(layers=[*SOUND, *frozen], excluded=names) == []


def test_a_layer_that_calls_no_site():
    foreign = Layer("decoder.layers.0.mlp.linear_fc2", "linear", "TERowParallelLinear", sited=False)
    (text,) = traps(layers=[*SOUND, foreign])
    assert "linear_fc2 (TERowParallelLinear) " in text
    assert traps(layers=[*SOUND, foreign], excluded=(foreign.name,)) == []


def test_a_layer_that_is_excluded_at_one_site_only_is_held_to_the_others():
    frozen = Layer("proj", "linear", "ColumnParallelLinear", frozen=True)

    def only_dgrad(site, layer):
        return site == "dgrad"

    asked = {"fprop": "mxfp8", "dgrad": "mxfp8"}
    assert len(find_traps(asked, Setup(), [*SOUND, frozen], only_dgrad)) == 1
    assert find_traps({"dgrad": "mxfp8"}, Setup(), [*SOUND, frozen], only_dgrad) == []


@pytest.mark.parametrize(("layers", "names"), [([LINEAR], "qk, pv"), ([ATTENTION], "fprop, dgrad")])
def test_a_model_without_such_layers(layers, names):
    (text,) = traps(layers=layers)
    assert text.startswith(names)
    assert text.endswith("no layer of the model has such a GEMM")


def test_nothing_asked_nothing_found():
    frozen = Layer("proj", "linear", "TELinear", frozen=True, sited=False)
    setup = Setup("inference_optimized", (), "dsa", deferred_embedding_wgrad=True, weight_shards=2)
    for asked in ({}, dict.fromkeys(ALL, "none")):
        assert traps(asked, setup, [frozen]) == []
        assert notes(asked, [ROUTER]) == []


def test_every_trap_is_named_at_once():
    setup = Setup("inference_optimized", (), "dsa", deferred_embedding_wgrad=True, weight_shards=2)
    assert len(traps(ALL, setup, [])) == 6


def test_what_never_has_a_site_is_said():
    gate = Layer("mlp.shared_experts.gate_weight", "other", "SharedExpertMLP", sited=False)
    texts = notes({"fprop": "mxfp8"}, [gate, *SOUND])
    assert [text.split(": ")[1] for text in texts] == [
        "decoder.layers.0.mlp.router (TopKRouter)",
        "mlp.shared_experts.gate_weight (SharedExpertMLP)",
    ]
    assert notes({"qk": "mxfp8"}, [gate, *SOUND]) == []
