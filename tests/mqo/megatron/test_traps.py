"""Each way to ask for a type and quantize nothing fires, with what to change."""

import sys
from argparse import Namespace

import pytest
from mqo.megatron.run import engine
from mqo.megatron.traps import find_traps, notes
from mqo.quant.labels import Layer

LINEAR = Layer("decoder.layers.0.mlp.linear_fc1", "linear", "ColumnParallelLinear")
HEAD = Layer("output_layer", "linear", "ColumnParallelLinear")
ATTENTION = Layer("decoder.layers.0.self_attention.core", "attention", "DotProductAttention")
ROUTER = Layer("decoder.layers.0.mlp.router", "router", "TopKRouter", sited=False)
SOUND = [LINEAR, HEAD, ATTENTION, ROUTER]
NO_ARGS = Namespace()
BYPASSES = Namespace(
    transformer_impl="inference_optimized",
    experimental_attention_variant="dsa",
    defer_embedding_wgrad_compute=True,
    gtp_weight_remat_size=2,
)
ALL = dict.fromkeys(("fprop", "dgrad", "wgrad", "qk", "pv"), "mxfp8")


def traps(asked=ALL, args=NO_ARGS, layers=SOUND, excluded=()):
    return find_traps(asked, args, layers, lambda site, layer: layer in excluded)


@pytest.mark.parametrize(
    "args",
    [
        NO_ARGS,
        Namespace(transformer_impl="local", gtp_weight_remat_size=1),
        Namespace(cuda_graph_impl="none", enable_cuda_graph=False),
    ],
)
def test_a_sound_run_has_none(args):
    assert traps(ALL, args) == []


@pytest.mark.parametrize("site", ALL)
def test_another_transformer_implementation(site):
    (text,) = traps({site: "mxfp8"}, Namespace(transformer_impl="inference_optimized"))
    assert "--transformer-impl inference_optimized: its layers do not call the sites" in text
    assert "pass --transformer-impl local" in text


def test_transformer_engines_layers_are_as_good_as_they_ask(monkeypatch):
    args = Namespace(transformer_impl="transformer_engine")
    monkeypatch.setattr(engine, "faults", lambda args: ())
    assert traps(ALL, args) == []
    monkeypatch.setattr(engine, "faults", lambda args: ("one", "two"))
    assert traps({"wgrad": "mxfp8"}, args) == ["one", "two"]
    assert traps({"qk": "mxfp8"}, args) == []  # whose GEMMs are the attention's


def test_another_attention():
    args = Namespace(experimental_attention_variant="dsa")
    (text,) = traps({"pv": "mxfp4"}, args)
    assert text.startswith("--experimental-attention-variant dsa: ")
    assert traps({"fprop": "mxfp4"}, args) == []


def test_a_deferred_embedding_wgrad():
    args = Namespace(defer_embedding_wgrad_compute=True)
    (text,) = traps({"fprop": "mxfp8", "wgrad": "mxfp8"}, args)
    assert text.startswith("--defer-embedding-wgrad-compute: ") and "'wgrad:output_layer'" in text
    assert traps({"fprop": "mxfp8"}, args) == []
    assert traps(ALL, args, excluded=("output_layer",)) == []


def test_gathered_weights():
    (text,) = traps({"dgrad": "mxfp8"}, Namespace(gtp_weight_remat_size=4))
    assert " 4 ranks" in text and "--tensor-parallel-num-weight-shards" in text
    assert traps({"qk": "mxfp8"}, Namespace(gtp_weight_remat_size=4)) == []


@pytest.mark.parametrize("module", ["GroupedMLP", "TEColumnParallelGroupedLinear"])
def test_grouped_experts(module, monkeypatch):
    experts = Layer("decoder.layers.0.mlp.experts.weight1", "other", module, sited=False)
    (text,) = traps(layers=[*SOUND, experts])
    assert text == (
        f"decoder.layers.0.mlp.experts.weight1 ({module}) bypasses the linear sites: "
        "leave out --moe-grouped-gemm"
    )
    assert traps({"qk": "mxfp8"}, layers=[*SOUND, experts]) == []
    # Asked for by an argument, they are named once.
    args = Namespace(num_experts=8, moe_grouped_gemm=True)
    monkeypatch.setitem(sys.modules, "megatron.core.models", None)  # so they have no sites
    (text,) = traps(args=args, layers=[*SOUND, experts])
    assert text.startswith("--moe-grouped-gemm: ")
    assert traps({"qk": "mxfp8"}, args) == []


def test_cuda_graphs():
    (text,) = traps({"qk": "mxfp8"}, Namespace(enable_cuda_graph=True))
    assert text.startswith("--cuda-graph-impl: ")
    assert traps({"qk": "none"}, Namespace(enable_cuda_graph=True)) == []


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
    assert len(find_traps(asked, NO_ARGS, [*SOUND, frozen], only_dgrad)) == 1
    assert find_traps({"dgrad": "mxfp8"}, NO_ARGS, [*SOUND, frozen], only_dgrad) == []


@pytest.mark.parametrize(("layers", "names"), [([LINEAR], "qk, pv"), ([ATTENTION], "fprop, dgrad")])
def test_a_model_without_such_layers(layers, names):
    (text,) = traps(layers=layers)
    assert text.startswith(names)
    assert text.endswith("no layer of the model has such a GEMM")


def test_nothing_asked_nothing_found():
    frozen = Layer("proj", "linear", "TELinear", frozen=True, sited=False)
    for asked in ({}, dict.fromkeys(ALL, "none")):
        assert traps(asked, BYPASSES, [frozen]) == []
        assert notes(asked, [ROUTER]) == []


def test_every_trap_is_named_at_once():
    assert len(traps(ALL, BYPASSES, [])) == 6


def test_what_never_has_a_site_is_said():
    gate = Layer("mlp.shared_experts.gate_weight", "other", "SharedExpertMLP", sited=False)
    texts = notes({"fprop": "mxfp8"}, [gate, *SOUND])
    assert [text.split(": ")[1] for text in texts] == [
        "decoder.layers.0.mlp.router (TopKRouter)",
        "mlp.shared_experts.gate_weight (SharedExpertMLP)",
    ]
    assert notes({"qk": "mxfp8"}, [gate, *SOUND]) == []
