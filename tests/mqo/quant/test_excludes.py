"""Layers that stay unquantized: the very tensors, records that say so, no silent typo."""

import pytest
import torch
from mqo.megatron.coverage import missing
from mqo.quant import excludes
from mqo.quant.excludes import unmatched
from mqo.quant.gemms import gemm_operands
from mqo.quant.labels import Layer
from mqo.quant.record import RECORDER

LAYERS = [
    *(
        Layer(f"decoder.layers.{i}.{name}", kind, "Linear", False)
        for i in range(12)
        for name, kind in (("mlp.linear_fc1", "linear"), ("attention.core", "attention"))
    ),
    Layer("output_layer", "linear", "ColumnParallelLinear", False),
    Layer("embedding.word_embeddings", "embedding", "VocabParallelEmbedding", False),
]


def owner(label):
    made = torch.nn.Identity()
    made.mqo_layer = label
    return made


def excluding(options, *patterns):
    options(f"[layers]\nexclude = {list(patterns)}\n")


@pytest.mark.parametrize(
    ("pattern", "site", "layer", "expected"),
    [
        ("output_layer", "fprop", "output_layer", True),
        ("output_layer", "wgrad", "output_layer", True),
        ("output_layer", "fprop", "mtp.output_layer", False),
        ("*output_layer", "fprop", "mtp.output_layer", True),
        ("decoder.layers.1.*", "qk", "decoder.layers.1.attention.core", True),
        ("decoder.layers.1.*", "qk", "decoder.layers.11.attention.core", False),
        ("decoder.layers.1", "qk", "decoder.layers.1.attention.core", False),
        ("decoder.layers.[01].*", "qk", "decoder.layers.1.attention.core", True),
        ("Output_Layer", "fprop", "output_layer", False),
        ("qk:decoder.*", "qk", "decoder.layers.1.attention.core", True),
        ("qk:decoder.*", "pv", "decoder.layers.1.attention.core", False),
    ],
)
def test_a_pattern_matches_the_whole_label(pattern, site, layer, expected):
    assert excludes.matches(pattern, site, layer) is expected


@pytest.mark.parametrize(
    ("exclude", "include", "left_out"),
    [
        ([], [], []),
        (["a"], [], ["a"]),
        ([], ["a"], ["b", "ab"]),
        ([], ["qk:*"], ["a", "b", "ab"]),
        ([], ["linear:a*"], ["b"]),
        (["ab"], ["a*"], ["b", "ab"]),
    ],
)
def test_a_layer_is_left_out_if_excluded_or_not_included(exclude, include, left_out):
    names = [n for n in ("a", "b", "ab") if excludes.leave_out(exclude, include, "fprop", n)]
    assert names == left_out


def test_an_excluded_layer_gets_the_operands_of_an_unquantized_one(options):
    excluding(options, "head", "qk:a.*")
    x = torch.randn(4, 32).requires_grad_()
    for site, label in (("fprop", "head"), ("wgrad", "head"), ("qk", "a.b")):
        operands = gemm_operands(site, "mxfp4", owner(label))
        assert operands.lhs(x) is x
        assert operands.rhs(x) is x
    for site, label in (("fprop", "body"), ("pv", "a.b")):
        assert not gemm_operands(site, "mxfp4", owner(label)).lhs(x).equal(x)


def test_records_say_that_a_layer_is_excluded(options):
    excluding(options, "head")
    x = torch.ones(4, 32)
    for label in ("head", "head", "body"):
        operands = gemm_operands("fprop", "mxfp4", owner(label))
        operands.lhs(x), operands.rhs(x)
    said = {(r.layer, r.operand): (r.quant_type, r.calls, r.sqnr_db) for r in RECORDER.entries()}
    assert said["head", "x"] == said["head", "weight"] == ("excluded", 2, None)
    assert said["body", "x"][:2] == ("mxfp4", 1)
    assert missing({"fprop": "mxfp4"}, RECORDER.entries()) == []


def test_a_layer_that_is_not_to_be_quantized_anyway_is_not_recorded(options):
    excluding(options, "head")
    gemm_operands("fprop", "none", owner("head"))
    assert RECORDER.entries() == []


def test_a_site_whose_layers_are_all_excluded_is_a_fault(options):
    excluding(options, "*")
    gemm_operands("fprop", "mxfp4", owner("head"))
    assert missing({"fprop": "mxfp4"}, RECORDER.entries()) == [
        "fprop: its type is mxfp4, but every layer is excluded"
    ]


@pytest.mark.parametrize(
    "pattern", ["output_layer", "decoder.layers.0.*", "*.core", "pv:*", "wgrad:output*"]
)
def test_a_pattern_that_matches_has_no_fault(pattern):
    assert unmatched([pattern], LAYERS) == []


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("ouput_layer", "output_layer"),
        ("decoder.layer.3.*", "decoder.layers.3."),
        ("decoder.layers.3", "decoder.layers.3."),
        ("qk:output_layer", "attention.core"),
        ("fprop:*.core", "mlp.linear_fc1"),
        ("embedding.word_embeddings", "decoder.layers."),
    ],
)
def test_a_pattern_that_matches_nothing_names_what_is_near(pattern, near):
    (fault,) = unmatched(["output_layer", pattern], LAYERS)
    assert f"pattern '{pattern}'" in fault and near in fault


def test_without_any_layer_there_is_nothing_near():
    assert unmatched(["a"], []) == [
        "the pattern 'a' matches no layer with such a GEMM; the model has none"
    ]
