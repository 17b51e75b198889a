"""The format table agrees with torch's own float8 types and with the OCP specification."""

import re

import pytest
import torch
from mqo.quant.formats import ELEMENTS, QUANT_TYPES, Minifloat, check_choice, check_type


@pytest.mark.parametrize(
    ("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_float8_elements_have_the_constants_of_torchs_types(name, dtype):
    element, info = ELEMENTS[name], torch.finfo(dtype)
    assert element.max_value == info.max
    assert 2.0**element.emin == info.smallest_normal
    assert 2.0**-element.mantissa_bits == info.eps
    assert 2.0**element.emax <= info.max < 2.0 ** (element.emax + 1)


@pytest.mark.parametrize(
    ("name", "smallest", "largest"),
    [("e2m1", 0.5, 6.0), ("e2m3", 0.125, 7.5), ("e3m2", 0.0625, 28.0)],
)
def test_elements_without_special_codes_span_what_mx_says(name, smallest, largest):
    """OCP Microscaling Formats (MX) v1.0, tables 2 and 3."""
    element = ELEMENTS[name]
    assert 2.0 ** (element.emin - element.mantissa_bits) == smallest
    assert element.max_value == largest
    assert 2.0**element.emax <= largest < 2.0 ** (element.emax + 1)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"bits": 9, "mantissa_bits": 3}, "bits of e?m?"),
        ({"bits": 8, "mantissa_bits": 0}, "mantissa bits of e?m?"),
        ({"bits": 8, "mantissa_bits": 1}, "exponent bits of e?m?"),
        ({"bits": 8, "mantissa_bits": 3, "special": "inf"}, "special codes of e?m?"),
    ],
)
def test_an_element_whose_arithmetic_is_not_there_is_refused(row, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Minifloat.from_row("e?m?", **row)


@pytest.mark.parametrize("name", QUANT_TYPES)
def test_every_source_literal_is_accepted(name):
    check_type(name)


@pytest.mark.parametrize("name", ["bf16", "MXFP8", "", None, "fp8"])
def test_another_literal_is_refused_and_the_valid_ones_named(name):
    with pytest.raises(ValueError, match="none, mxfp8, mxfp4, hifp8"):
        check_type(name)


def test_a_number_of_another_type_is_no_choice():
    with pytest.raises(ValueError, match=r"unknown block size 32\.0; valid: 16, 32"):
        check_choice("block size", 32.0, (16, 32))
