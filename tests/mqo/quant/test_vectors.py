"""The formats of published recipes against stored results: the reference, and what a CPU runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS
from mqo.quant.packing import pack
from mqo.quant.reference import qdq
from mqo.quant.scales import alpha_of
from mqo.quant.spec import QuantSpec, without_alpha

from ...oracles.formats import int8_block, ufp4

VECTORS = np.load(Path(__file__).parents[2] / "vectors" / "recipes_vectors.npz")
# What the file calls a format -> its spec here; the others have the same name.
SPECS = {
    "nvfp4_1x16": QuantSpec("nvfp4"),
    "nvfp4_16x16": QuantSpec("nvfp4", tile="square"),
    "fp8_1x128": QuantSpec("fp8_block"),
    "fp8_128x128": QuantSpec("fp8_block", tile="square"),
    "fp8_1x128_fp32scale": QuantSpec("fp8_block_fp32"),
}
# Formats without public code -> their definition in numpy.
DEFINED = {"ufp4": ufp4, "int8_block": int8_block}
CASES = [key.removeprefix("in/") for key in VECTORS if key.startswith("in/")]
NOT_BUILT = "hif4_unrounded_mantissa"
KEYS = [key.split("/") for key in VECTORS if not key.startswith(("in/", NOT_BUILT))]
QUANTIZERS = {"reference": qdq, "default": lambda x, spec, axis: fake_quantize(x, spec, axis=axis)}

every_vector = pytest.mark.parametrize(("name", "case"), KEYS)
every_quantizer = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)


def spec_of(name):
    return SPECS.get(name) or QuantSpec(name)


@pytest.fixture
def vector(name, case):
    """The input, and what becomes of it."""
    expected = torch.from_numpy(VECTORS[f"{name}/{case}"])
    # The file's integers have a zero with a sign, as a float has it; mxint8's has none.
    expected = expected.where(expected != 0, 0.0) if name == "mxint8" else expected
    return torch.from_numpy(VECTORS[f"in/{case}"]), expected


@every_vector
@every_quantizer
def test_blocks_along_either_axis_bit_for_bit(assert_same_bits, vector, name, case, quantize):
    x, expected = vector
    spec = spec_of(name)
    assert_same_bits(quantize(x, spec, -1), expected)
    assert_same_bits(quantize(x.T.contiguous(), spec, 0), expected.T)
    if spec.tile == "square":
        assert_same_bits(quantize(x, spec, 0), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case != "nonfinite"])
@pytest.mark.parametrize("name", DEFINED)
@every_quantizer
def test_formats_without_public_code_are_their_definition(assert_same_bits, name, case, quantize):
    x = VECTORS[f"in/{case}"]
    expected = torch.from_numpy(DEFINED[name](x))
    assert_same_bits(quantize(torch.from_numpy(x), QuantSpec(name), -1), expected)
    assert_same_bits(pack(torch.from_numpy(x), QuantSpec(name)).unpack(), expected)


@every_vector
def test_a_value_is_alpha_times_what_the_gemm_multiplies(vector, name, case):
    x, expected = vector
    spec = spec_of(name)
    scaled = fake_quantize(x, without_alpha(spec))
    alpha = alpha_of(x.abs().max().item(), spec)
    # The value rounds the product of both scales to float32 first.
    value = (scaled.double() * alpha).float()
    torch.testing.assert_close(value, expected, rtol=2.0**-22, atol=0, equal_nan=True)
    assert (alpha == 1.0) != spec.scales_by_tensor or x.abs().max().isnan()


@every_vector
def test_packed_storage_gives_them_back(assert_same_bits, vector, name, case):
    x, expected = vector
    assert_same_bits(pack(x, spec_of(name)).unpack(), expected)


def test_there_are_vectors_of_every_format_but_those_of_the_older_files():
    older = {"mxfp8", "mxfp8_e5m2", "mxfp4", "hifp8"}
    of_an_oracle = {"nvfp4_ue5m3", "fp4_ue5m3"}  # in test_oracle_levels.py
    stored = {spec_of(name).quant_type for name, _ in KEYS}
    assert stored | older | of_an_oracle | {*DEFINED} == set(FORMATS)
    cases = {key.removeprefix("in/") for key in VECTORS if key.startswith("in/")}
    assert {case for _, case in KEYS} == cases
