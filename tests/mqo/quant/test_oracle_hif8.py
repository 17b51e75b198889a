"""The HiFloat8 reference against en_dtypes, from which it differs nowhere.

Where en_dtypes has a wheel (pyproject.toml), it is imported outright: a run without it fails.
"""

import platform
import sys

import numpy as np
import pytest
import torch
from mqo.quant.codes import code_values
from mqo.quant.packing import pack
from mqo.quant.spec import QuantSpec

if sys.version_info >= (3, 13) or platform.machine() != "x86_64":
    pytest.skip("en_dtypes has no wheel for this Python or machine", allow_module_level=True)

import en_dtypes

PATTERNS = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def test_en_dtypes_decodes_every_code_alike():
    codes = np.arange(256, dtype=np.uint8).view(en_dtypes.hifloat8)
    assert np.array_equal(codes.astype(np.float32), code_values("hifp8"), equal_nan=True)


def en_dtypes_codes(x):
    with np.errstate(invalid="ignore"):  # NaN is among the patterns
        codes = x.float().numpy().astype(en_dtypes.hifloat8)
    return torch.from_numpy(codes.view(np.uint8))


def test_en_dtypes_gives_every_bfloat16_pattern_the_same_code():
    codes = pack(PATTERNS, QuantSpec("hifp8", overflow="inf")).codes
    assert codes.equal(en_dtypes_codes(PATTERNS))


def test_en_dtypes_gives_random_float32_patterns_the_same_codes():
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(3))
    x = bits.to(torch.int32).view(torch.float32)
    near_one = torch.randn(2**18, generator=torch.Generator().manual_seed(4)) * 2.0**-3
    for values in (x, near_one, near_one * 2.0**-18, near_one * 2.0**17):
        codes = pack(values, QuantSpec("hifp8", overflow="inf")).codes
        assert codes.equal(en_dtypes_codes(values))


def test_ties_to_even_differ_from_en_dtypes_on_three_percent_of_normal_bfloat16():
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(5)).bfloat16()
    even = pack(x, QuantSpec("hifp8", rounding="nearest-even", overflow="inf")).codes
    differing = (even != en_dtypes_codes(x)).double().mean().item()
    assert differing == pytest.approx(0.031, abs=0.002)
