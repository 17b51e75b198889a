"""FP4 in blocks of 16 against an oracle in numpy: UE5M3 scales, and four over six."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant import reference
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS
from mqo.quant.packing import pack
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.recipe_files import HERE
from mqo.quant.scales import alpha_of, scales_of
from mqo.quant.spec import QuantSpec, without_alpha
from mqo.quant.stochastic import draws

from ...oracles.elements import E4M3, UE5M3
from ...oracles.formats import fp4_blocks, fp4_levels
from .tensors import DTYPES, normal

RULES = {"amax": "", "four-over-six-mse": "mse", "four-over-six-mae": "mae"}
ELEMENTS = {"nvfp4": E4M3, "nvfp4_ue5m3": UE5M3}
WAYS = [(kind, rule) for kind in ELEMENTS for rule in RULES] + [("fp4_ue5m3", "floor")]
TILES = ("row", "square")
QUANTIZERS = {"reference": reference.qdq, "default": fake_quantize}
every_way = pytest.mark.parametrize(("kind", "rule"), WAYS)
every_tile = pytest.mark.parametrize("tile", TILES)
every_quantizer = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)


@cache
def expected_of(name, spec, dtype):
    """What the oracle makes of a matrix of the data: once for all quantizers."""
    return oracle(data()[name].to(dtype), spec)


def oracle(x, spec, amax=None, drawn=None):
    """What the oracle makes of a matrix of any dtype, in that dtype."""
    matrix, square = x.float().numpy(), spec.tile == "square"
    if spec.quant_type == "fp4_ue5m3":
        result = fp4_blocks(matrix, square, drawn)
    else:
        error = RULES[spec.scale_rule]
        result = fp4_levels(matrix, ELEMENTS[spec.quant_type], error, square, drawn, amax)
    return torch.from_numpy(result).to(x.dtype)


@cache
def data():
    """{name: a matrix}: short blocks and bands, all magnitudes, ties, and what is not finite."""
    grid = torch.tensor([0, 0.25, 0.5, 0.75, 1.25, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6])
    picked = torch.randint(len(grid), (37, 70), generator=torch.Generator().manual_seed(1))
    bits = torch.randint(-(2**31), 2**31, (33, 50), generator=torch.Generator().manual_seed(2))
    rows = normal(40, 83) * torch.exp2(6 * normal(40, 1, seed=3))
    return {
        "normal": normal(35, 70),
        "spread": rows,
        "blocks of zero scale": rows * torch.logspace(-12, 0, 40).unsqueeze(1),
        "ties": grid[picked] * normal(37, 70).sign() * 0.7,
        "zeros": torch.zeros(5, 20),
        "huge": normal(20, 40) * 8e37,
        "tiny": normal(20, 40) * 2.0**-126,
        "subnormal": normal(20, 40) * 2.0**-140,
        "patterns": bits.to(torch.int32).view(torch.float32).nan_to_num(),
        "nan": torch.where(normal(20, 40, seed=4) > 2.5, torch.nan, normal(20, 40)),
        "inf": torch.where(normal(20, 40, seed=4) > 2.5, -torch.inf, normal(20, 40)),
    }


@pytest.mark.parametrize("name", data())
@every_way
@every_tile
@every_quantizer
def test_it_is_the_oracles_bit_for_bit(assert_same_bits, quantize, name, kind, rule, tile):
    spec = QuantSpec(kind, scale_rule=rule, tile=tile)
    for dtype in DTYPES:
        x, expected = data()[name].to(dtype), expected_of(name, spec, dtype)
        assert_same_bits(quantize(x, spec), expected)
        assert_same_bits(quantize(x.T.contiguous(), spec, axis=0), expected.T)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from(WAYS),
    st.sampled_from(TILES),
    st.tuples(st.integers(1, 40), st.integers(1, 70)),
    st.integers(-140, 120),
    st.integers(0, 2**32),
    st.sampled_from((1, 4, 16)),
)
def test_any_matrix(assert_same_bits, way, tile, shape, exponent, seed, steps):
    """Elements of few steps have many ties, and many blocks without an error."""
    kind, rule = way
    x = normal(*shape, seed=seed)
    x = (x * 3 * steps).round() / steps * 2.0**exponent if steps < 16 else x * 2.0**exponent
    spec = QuantSpec(kind, scale_rule=rule, tile=tile)
    assert_same_bits(fake_quantize(x, spec), oracle(x, spec))


@every_way
@every_tile
@every_quantizer
@pytest.mark.parametrize("held", [1e-30, 1e-3, 0.3, 5.0])
def test_a_held_amax(assert_same_bits, quantize, kind, rule, tile, held):
    x, spec = normal(35, 70), QuantSpec(kind, scale_rule=rule, tile=tile)
    assert_same_bits(quantize(x, spec, amax=torch.tensor(held)), oracle(x, spec, held))


@every_way
@every_tile
@every_quantizer
def test_stochastic_rounding_leaves_the_choice_to_the_nearest(
    assert_same_bits, quantize, kind, rule, tile
):
    spec = QuantSpec(kind, scale_rule=rule, tile=tile, rounding="stochastic")
    x = normal(35, 70)
    expected = oracle(x, spec, drawn=draws(x.shape, 5).numpy())
    assert_same_bits(quantize(x, spec, seed=5), expected)
    of_nearest = scales_of(x, QuantSpec(kind, scale_rule=rule, tile=tile)).stored
    assert scales_of(x, spec).stored.block.equal(of_nearest.block)


@every_way
@every_tile
def test_packed_storage_gives_them_back(assert_same_bits, kind, rule, tile):
    spec = QuantSpec(kind, scale_rule=rule, tile=tile)
    for x in data().values():
        for rounding in ("nearest-even", "stochastic"):
            drawn = QuantSpec(kind, scale_rule=rule, tile=tile, rounding=rounding)
            packed = pack(x, drawn, seed=3)
            assert_same_bits(packed.unpack(), fake_quantize(x, drawn, seed=3))
        assert_same_bits(pack(x.bfloat16(), spec).unpack(), fake_quantize(x.bfloat16(), spec))


@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_alpha_times_the_rest_is_the_value(kind, rule):
    x, spec = normal(35, 70), QuantSpec(kind, scale_rule=rule)
    alpha = alpha_of(x.abs().max().item(), spec)
    rest = fake_quantize(x, without_alpha(spec))
    value = (rest.double() * alpha).float()
    torch.testing.assert_close(value, fake_quantize(x, spec), rtol=2.0**-22, atol=0)


# -- the example in Python ------------------------------------------------------------------------


@every_tile
def test_four_over_six_chooses_as_the_example_for_nearly_all_blocks(tile):
    """The example rounds the scale of the tensor and of blocks in another order."""
    load_quantizers(HERE / "four_over_six.py")
    x = normal(256, 1024) * torch.exp2(normal(256, 1, seed=1))
    spec = QuantSpec("nvfp4", scale_rule="four-over-six-mae", tile=tile)
    ours, theirs = fake_quantize(x, spec), fake_quantize(x, QuantSpec("four_over_six", tile=tile))
    equal = torch.isclose(ours, theirs, rtol=2.0**-20, atol=0)
    assert equal.double().mean() > 0.999


def test_formats_have_the_rules_of_their_scale():
    assert FORMATS["nvfp4"].scale_rules == FORMATS["nvfp4_ue5m3"].scale_rules == tuple(RULES)
    assert QuantSpec("nvfp4", scale_rule="rceil") == QuantSpec("nvfp4", scale_rule="amax")
    assert QuantSpec("mxfp4", scale_rule="four-over-six-mse") == QuantSpec("mxfp4")
    assert QuantSpec("fp4_ue5m3", scale_rule="four-over-six-mse") == QuantSpec("fp4_ue5m3")
