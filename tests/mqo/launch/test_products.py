"""The table of a coverage, on made-up products."""

import json
from dataclasses import replace

import pytest
from mqo.launch.products import (
    AT_NONE,
    AUTOGRAD,
    EVEN_EXPERTS,
    NO_SITE,
    Coverage,
    Product,
    coverage_lines,
    groups,
)


def product(layer, gemm, quant_type, batch=1, m=2, n=3, k=5, calls=1):
    return Product(layer, gemm, quant_type, batch, m, n, k, calls, 2 * batch * m * n * k * calls)


LAYERS = tuple(
    row
    for i in range(12)
    for row in (
        product(f"decoder.layers.{i}.up", "fprop", "mxfp8"),
        product(f"decoder.layers.{i}.core", "qk", "mxfp4", batch=4),
        product(f"decoder.layers.{i}.core", "qk backward", None, batch=4),
    )
)
HEAD = (
    product("output_layer", "fprop", "mxfp8", n=60),
    product("output_layer", "dgrad", "none", n=60),
    product("router", "mm", None),
)
MADE = Coverage(1, 8192, 1_000_000, LAYERS + HEAD, ("embedding.words",))
# In units of one fprop: layers 12 x (1 + 4 + 4), the head 2 x 20, the router 1.
UNITS = 12 * 9 + 40 + 1


def test_the_share_is_of_all_flops():
    assert MADE.flops == 60 * UNITS
    assert MADE.shares == {
        ("fprop", "mxfp8"): pytest.approx(32 / UNITS),
        ("qk", "mxfp4"): pytest.approx(48 / UNITS),
    }
    assert MADE.share == pytest.approx(80 / UNITS)
    assert MADE.summary() == (
        "53.7% of a step's matrix-product FLOPs quantized (fprop mxfp8 21.5%, qk mxfp4 32.2%)"
    )


def test_nothing_quantized_is_nothing():
    bare = replace(MADE, products=HEAD[1:])
    assert (bare.share, bare.summary()) == (0, "0.0% of a step's matrix-product FLOPs quantized")


def test_each_product_that_is_not_quantized_says_why():
    reasons = {(row.layer, row.gemm): row.reason for row in MADE.products}
    assert reasons["decoder.layers.3.core", "qk"] == ""
    assert reasons["decoder.layers.3.core", "qk backward"] == AUTOGRAD
    assert reasons["output_layer", "dgrad"] == AT_NONE
    assert reasons["router", "mm"] == NO_SITE


def test_layers_that_differ_in_their_number_alone_are_one_group():
    found = [(g.pattern, g.layers) for g in groups(MADE.products)]
    assert found == [
        ("decoder.layers.*.up", 12),
        ("decoder.layers.*.core", 12),
        ("output_layer", 1),
        ("router", 1),
    ]


def test_the_order_of_a_layers_products_does_not_matter():
    assert len(groups(LAYERS[:6])) == len(groups((*LAYERS[:3], *reversed(LAYERS[3:6])))) == 2


@pytest.mark.parametrize("change", [{"n": 4}, {"quant_type": "none"}, {"calls": 2}])
def test_layers_of_other_shapes_types_or_calls_are_groups_of_their_own(change):
    changed = [replace(p, **change) if p.layer == "decoder.layers.7.up" else p for p in LAYERS]
    assert [g.layers for g in groups(changed) if g.pattern.endswith("up")] == [11, 1]


def test_the_table():
    text = coverage_lines(MADE)
    assert max(map(len, text)) <= 80
    at = text.index("decoder.layers.*.core x12")
    assert text[at + 1].split() == ["qk", "4", "2", "3", "5", "mxfp4", "32.2%"]
    assert text[at + 2].split() == ["qk", "backward", "4", "2", "3", "5", "-", "(a)", "32.2%"]
    assert "output_layer" in text
    assert "53.7% of the FLOPs are quantized" in text
    at = text.index("embedding.words")
    assert "no matrix product" in text[at + 1]
    for mark, reason in zip("abc", (AUTOGRAD, AT_NONE, NO_SITE), strict=True):
        assert f"({mark}) {reason}" in text
    shares = [line.split()[-1] for line in text if line.endswith("%")][: -len(MADE.shares)]
    assert sum(float(share[:-1]) for share in shares) == pytest.approx(100, abs=0.3)


def test_reasons_have_letters_and_experts_a_word():
    routed = product("decoder.layers.1.mlp.experts.local_experts.0.up", "fprop", "mxfp8")
    text = coverage_lines(replace(MADE, products=(*MADE.products, *HEAD, routed)))
    assert text[-1] == EVEN_EXPERTS
    assert EVEN_EXPERTS not in coverage_lines(MADE)
    assert [line for line in text if line.startswith("  mm ") and "(c)" in line]


def test_a_recomputed_product_says_how_often():
    made = replace(MADE, products=(product("up", "fprop", "mxfp8", calls=2),))
    assert any(line.startswith("  fprop x2 ") for line in coverage_lines(made))


def test_json_and_back():
    table = json.loads(json.dumps(MADE.as_table()))
    assert [row.pop("reason") for row in table["products"]][:3] == ["", "", AUTOGRAD]
    assert table["quantized_share"] == pytest.approx(80 / UNITS)
    assert Coverage(**table) == MADE
