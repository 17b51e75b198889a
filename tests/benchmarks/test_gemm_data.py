"""Quantized matrices taken apart, and what the benchmark of accumulation makes of them."""

import pytest
import torch
from mqo.quant.backend import fake_quantize

KINDS = ("mxfp8", "mxfp4", "nvfp4", "hif4", "fp8_tensor_e4m3", "fp8_block", "fp8_block_fp32")
SAMPLE = 5


@pytest.fixture(scope="module")
def gemm_data(benchmark_module):
    return benchmark_module("gemm_data")


def matrix():
    """Two rows after the sample hold the largest values: a tensor's scale is not the sample's."""
    x = torch.randn(SAMPLE + 2, 256, generator=torch.Generator().manual_seed(1))
    x[SAMPLE:] *= 7
    return x


@pytest.mark.parametrize("kind", ("none", *KINDS))
def test_parts_multiplied_are_the_quantized_matrix(gemm_data, kind):
    operand = gemm_data.quantize(matrix(), kind, SAMPLE)
    scales = operand.scales.repeat_interleave(operand.block, dim=1)
    assert (operand.elements * scales).float().equal(operand.sample)
    # nvfp4 rounds its two scales' product to float32, and once more times an element.
    value = fake_quantize(matrix(), operand.spec)[:SAMPLE]
    value = value.bfloat16().float() if kind == "none" else value
    torch.testing.assert_close(operand.sample * operand.alpha, value, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_belong_to_the_formats_blocks(gemm_data, kind):
    operand = gemm_data.quantize(matrix(), kind, SAMPLE)
    assert operand.block == (operand.spec.block or 256)
    assert operand.elements.count_nonzero() > 200


@pytest.mark.parametrize("kind", ("none", *KINDS))
def test_a_tensor_core_gets_short_numbers(gemm_data, kind):
    operand = gemm_data.quantize(matrix(), kind, SAMPLE)
    part = operand.elements if operand.has_long_scales else operand.sample.double()
    assert part.equal(part.bfloat16().double())


def test_the_benchmark_compares_every_way_with_the_same_product(benchmark_module, gemm_data):
    accumulation = benchmark_module("accumulation")
    size = accumulation.Size((256,), tokens=24, outputs=16, sample=8)
    rows = dict(accumulation.measure(gemm_data.DATA["normal"], size))
    assert {kind for _, kind in rows} == set(accumulation.KINDS)
    for (_, kind), errors in rows.items():
        quantization = errors.pop("quantization")
        assert errors["fp32 GEMM"].noise <= errors["14 bits by 128"].noise
        # No way to sum so short a product is as wrong as a format of 8 bits or fewer.
        if kind != "none":
            assert max(one.noise for one in errors.values()) < quantization.noise / 5
