"""The spec: defaults by format, refusals that name the valid choices, equality and hashing."""

import dataclasses
import re

import pytest
from mqo.quant.formats import REFERENCE_TYPES
from mqo.quant.spec import QuantSpec


def test_the_other_defaults_are_those_of_the_formats_papers_and_of_training():
    spec = QuantSpec("mxfp8")
    assert (spec.block, spec.scale_rule, spec.overflow) == (32, "floor", "saturate")
    assert spec.tensor_scale is False


def test_equal_choices_make_equal_specs_whether_spelt_out_or_not():
    spelt = QuantSpec("hifp8", rounding="nearest-away", tensor_scale=False)
    assert spelt == QuantSpec("hifp8")
    assert {spelt: 1}[QuantSpec("hifp8")] == 1
    assert spelt != QuantSpec("hifp8", tensor_scale=True)


@pytest.mark.parametrize(
    ("kind", "block"),
    [("mxint8", 16), ("nvfp4", 16), ("hif4", 64), ("fp8_block", 128), ("fp8_tensor_e4m3", None)],
)
def test_the_block_is_a_choice_of_mx_formats_alone(kind, block):
    assert QuantSpec(kind, block=16).block == block


@pytest.mark.parametrize("kind", REFERENCE_TYPES)
def test_square_tiles_are_those_of_the_formats_that_have_them(kind):
    """All with blocks, but hif4, whose blocks have parts, and ufp4, which is published without."""
    square = kind not in ("hif4", "ufp4") and QuantSpec(kind).block is not None
    assert QuantSpec(kind, tile="square").tile == ("square" if square else "row")


def test_a_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantSpec("mxfp8").block = 16


@pytest.mark.parametrize("kind", REFERENCE_TYPES)
def test_what_a_format_has_no_use_for_is_allowed(kind):
    QuantSpec(kind, block=16, scale_rule="rceil", overflow="inf", tensor_scale=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"quant_type": "fp8"}, "'fp8'; valid: none, mxfp8, mxfp4, hifp8, mxfp8_e5m2"),
        ({"block": 24}, "block size 24; valid: 16, 32, 64, 128"),
        ({"block": 32.0}, "block size 32.0; valid: 16, 32, 64, 128"),
        ({"scale_rule": "round"}, "'round'; valid: floor, rceil, ceil, even"),
        ({"rounding": "rne"}, "rounding 'rne'; valid: nearest-even, nearest-away, stochastic"),
        ({"overflow": "wrap"}, "'wrap'; valid: saturate, inf"),
        ({"tensor_scale": 1}, "tensor scale 1; valid: False, True"),
        ({"tile": "column"}, "tile 'column'; valid: row, square"),
    ],
)
@pytest.mark.parametrize("kind", ["mxfp8", "hifp8", "none"])
def test_an_unknown_choice_is_refused_and_the_valid_ones_named(kind, arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        QuantSpec(**{"quant_type": kind, **arguments})
