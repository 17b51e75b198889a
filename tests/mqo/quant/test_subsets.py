"""Subsets of a model's GEMMs: which layers and operands are quantized alone."""

import pytest
from mqo.quant.formats import ATTENTION, LINEAR, SITES
from mqo.quant.layer_rules import LayerRecipe, LayerRule
from mqo.quant.operand_table import OperandRow
from mqo.quant.quant_config import QuantConfig
from mqo.quant.subsets import KINDS, PATTERNS, quantized_layers, subsets, unquantized

BLOCKS = [f"decoder.layers.{n}" for n in (0, 1, 10)]
LAYERS = {
    LINEAR: [
        *(f"{block}.mlp.linear_fc{n}" for block in BLOCKS[:2] for n in (1, 2)),
        *(f"{BLOCKS[2]}.mlp.experts.local_experts.{n}.linear_fc1" for n in (0, 1)),
        "output_layer",
    ],
    ATTENTION: [f"{block}.self_attention.core_attention" for block in BLOCKS],
}
EVERY = {layer for layers in LAYERS.values() for layer in layers}
GEMMS = {"fprop": "mxfp4", "dgrad": "mxfp4", "wgrad": "mxfp4", "qk": "mxfp8"}
OPTIONS = QuantConfig(asked=GEMMS)


def quantized(options):
    """{(site, operand, layer): type} of all that is quantized."""
    return {
        (site, operand, layer): kind
        for site, of_site in options.asked.items()
        for operand in (SITES[site].lhs, SITES[site].rhs)
        for layer in LAYERS[SITES[site].layer]
        if (kind := options.operand_type(site, operand, layer, of_site)) != "none"
    }


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("block", [*(f"{block}.*" for block in BLOCKS), "output_layer"]),
        (
            "part",
            [
                "decoder.layers.*.mlp.linear_fc1",
                "decoder.layers.*.mlp.linear_fc2",
                "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1",
                "output_layer",
                "decoder.layers.*.self_attention.core_attention",
            ],
        ),
        ("layer", [*LAYERS[LINEAR], *LAYERS[ATTENTION]]),
        ("gemm", list(SITES)),
        ("operand", [f"{s.name}.{o}" for s in SITES.values() for o in (s.lhs, s.rhs)]),
    ],
)
def test_each_operand_is_in_one_subset(kind, names):
    members = subsets(OPTIONS, kind, LAYERS)
    named = [member.name for member in members]
    assert named == [name for name in names if kind in PATTERNS or name.partition(".")[0] in GEMMS]
    each = [quantized(member.options) for member in members]
    assert sum(map(len, each)) == len(quantized(OPTIONS))
    assert {key: kind for one in each for key, kind in one.items()} == quantized(OPTIONS)
    for member, only in zip(members, each, strict=True):
        assert set(member.layers) == {layer for _, _, layer in only}


def test_layers_that_a_rule_keeps_are_in_no_subset():
    rules = (LayerRule("linear:*.mlp.*", "none"), LayerRule(f"{BLOCKS[0]}.*", "none"))
    options = QuantConfig(asked=GEMMS, rules=rules)
    names = [member.name for member in subsets(options, "block", LAYERS)]
    assert names == [f"{BLOCKS[1]}.*", f"{BLOCKS[2]}.*", "output_layer"]
    assert quantized_layers(options, LAYERS) == ("output_layer", *LAYERS[ATTENTION][1:])


def test_one_operand_keeps_its_row_and_the_transform_of_the_other():
    rows = {
        "wgrad.grad": OperandRow(rounding="stochastic", hadamard=16, signs="fixed"),
        "wgrad.x": OperandRow(hadamard=16, signs="fixed", tile="square"),
    }
    options = QuantConfig(asked=GEMMS, operands=rows)
    only = {member.name: member.options for member in subsets(options, "operand", LAYERS)}
    layer = LAYERS[LINEAR][0]
    grad, x = (only["wgrad.grad"].operand_spec("wgrad", o, layer, "mxfp4") for o in ("grad", "x"))
    assert (grad.spec.rounding, x.is_quantized, x.hadamard) == ("stochastic", False, grad.hadamard)


def test_one_operand_of_layers_with_a_rule_has_the_type_of_the_rule():
    rules = (
        LayerRule("linear:*.linear_fc1", "mxfp8"),
        LayerRule("linear:*.linear_fc2", recipe="other"),
        LayerRule("linear:output_layer", "none"),
    )
    other = LayerRecipe({"fprop": "nvfp4"}, {"fprop.x": OperandRow("mxfp6_e2m3")})
    options = QuantConfig(asked={"fprop": "mxfp4"}, rules=rules, recipes={"other": other})
    only = {
        member.name: quantized(member.options) for member in subsets(options, "operand", LAYERS)
    }
    assert {**only["fprop.x"], **only["fprop.weight"]} == quantized(options)
    assert not only["fprop.x"].keys() & only["fprop.weight"].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_quantize_nothing_have_no_subset(kind):
    assert quantized(unquantized(OPTIONS)) == {}
    assert subsets(QuantConfig(), kind, LAYERS) == []
    assert subsets(QuantConfig(asked=dict.fromkeys(GEMMS, "none")), kind, LAYERS) == []
