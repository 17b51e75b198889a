"""The format table agrees with torch's own float8 types and with the OCP specification."""

import pytest
import torch
from megatron.quant.formats import E2M1, E4M3, E5M2, QUANT_TYPES, check_choice, check_type


@pytest.mark.parametrize(
    ("element", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)]
)
def test_float8_elements_have_the_constants_of_torchs_types(element, dtype):
    info = torch.finfo(dtype)
    assert element.max_value == info.max
    assert 2.0**element.emin == info.smallest_normal
    assert 2.0**-element.mantissa_bits == info.eps
    assert 2.0**element.emax <= info.max < 2.0 ** (element.emax + 1)


def test_e2m1_spans_half_to_six():
    assert 2.0 ** (E2M1.emin - E2M1.mantissa_bits) == 0.5
    assert 2.0**E2M1.emax * 1.5 == E2M1.max_value == 6.0


@pytest.mark.parametrize("name", QUANT_TYPES)
def test_every_source_literal_is_accepted(name):
    check_type(name)


@pytest.mark.parametrize("name", ["bf16", "MXFP8", "", None, "mxfp8_e5m2"])
def test_another_literal_is_refused_and_the_valid_ones_named(name):
    with pytest.raises(ValueError, match="none, mxfp8, mxfp4, hifp8"):
        check_type(name)


def test_a_number_of_another_type_is_no_choice():
    with pytest.raises(ValueError, match=r"unknown block size 32\.0; valid: 16, 32"):
        check_choice("block size", 32.0, (16, 32))
