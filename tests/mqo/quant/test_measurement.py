"""What is measured of a quantized operand, against a plain count of the same."""

import math

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import BLOCK_SIZES
from mqo.quant.measurement import Measurement, count_true, measure, merge
from mqo.quant.packing import pack
from mqo.quant.spec import QuantSpec

from .mx import MX_RULES

KEY = ("fprop", "layers.0", "x", "mxfp8")


def measured(x, spec, axis=-1):
    quantized = fake_quantize(x, spec, axis=axis, seed=0)
    return Measurement.from_sums(KEY, measure(x, quantized, spec, axis).flat().tolist())


def wide(*shape, seed=0):
    """Normal numbers over many binades, a tenth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
    return x * (torch.rand(*shape, generator=generator) > 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("mxfp8"),
        QuantSpec("mxfp4", block=16, scale_rule="rceil"),
        QuantSpec("mxfp8_e5m2", block=64, scale_rule="even"),
        QuantSpec("mxfp4", rounding="stochastic"),
        QuantSpec("hifp8"),
        QuantSpec("hifp8", tensor_scale=True),
        QuantSpec("mxint8"),
        QuantSpec("nvfp4"),
        QuantSpec("hif4"),
        QuantSpec("fp8_tensor_e4m3"),
        QuantSpec("fp8_block", tile="square"),
        QuantSpec("fp8_block_fp32"),
    ],
    ids=str,
)
def test_counts_and_energies_are_those_of_a_plain_count(spec, dtype):
    x = wide(40, 50).to(dtype)
    q = fake_quantize(x, spec, axis=0, seed=0)
    found = measured(x, spec, axis=0)
    assert found.elements == 2000
    assert found.nonzero == int((x != 0).sum())
    assert found.underflowed == int(((x != 0) & (q == 0)).sum()) > 0
    assert found.amax == x.abs().max().item()
    assert found.signal == pytest.approx(x.double().square().sum().item(), rel=1e-7)
    noise = (x.double() - q.double()).square().sum().item()
    # The error is taken in float32: to 2^-24 of x, where it is some 2 % of it.
    assert found.noise == pytest.approx(noise, rel=1e-4)
    assert found.sqnr_db == pytest.approx(10 * math.log10(found.signal / noise), abs=1e-3)
    change = (x.double() * (q.double() - x.double())).sum().item()
    assert found.bias == pytest.approx(change / found.signal, abs=1e-5)


@pytest.mark.parametrize("rule", MX_RULES)
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("quant_type", ["mxfp8", "mxfp4"])
def test_the_histogram_counts_the_scales_that_packing_stores(quant_type, block, rule):
    x, spec = wide(6, 100), QuantSpec(quant_type, block=block, scale_rule=rule)
    x[0, 0] = torch.inf
    bytes_ = pack(x, spec).scales.block.flatten().tolist()
    found = measured(x, spec).scales
    assert found == {b - 127: bytes_.count(b) for b in sorted(set(bytes_))}
    assert found[128] == 1


def test_rounding_to_zero_shrinks_and_unbiased_rounding_does_not():
    x = torch.full((64, 32), 0.1)
    x[:, 0] = 6  # the scale of mxfp4 is 1, and 0.1 becomes 0
    assert measured(x, QuantSpec("mxfp4")).bias == pytest.approx(-0.31 / 36.31, rel=1e-4)
    assert abs(measured(x, QuantSpec("mxfp4", rounding="stochastic")).bias) < 0.001


def test_the_spread_of_scales_is_in_powers_of_two():
    x = torch.ones(4, 32) * 2.0 ** torch.tensor([[0], [0], [4], [4]])
    assert measured(x, QuantSpec("mxfp8")).scale_spread == 2
    x[0, 0] = torch.nan  # its block has no scale
    assert measured(x, QuantSpec("mxfp8")).scale_spread == pytest.approx(math.sqrt(32 / 9))
    assert measured(x, QuantSpec("hifp8")).scale_spread is None


def test_a_format_without_scales_has_no_histogram_and_a_tensor_scale_one():
    assert measured(wide(4, 8), QuantSpec("hifp8")).scales == {}
    found = measured(torch.tensor([1.0, 100.0]), QuantSpec("hifp8", tensor_scale=True))
    assert found.scales == {3: 1}  # 2^3 takes 100 to 12.5, into 8 .. 16


def test_saturated_is_what_lies_beyond_the_largest_value():
    # The block's amax is 511, so floor gives the scale 1 and E4M3 ends at 448.
    x = torch.tensor([511.0, -460.0, 448.0, 447.0] + [0.0] * 28)
    assert measured(x, QuantSpec("mxfp8")).saturated == 2
    assert measured(x, QuantSpec("mxfp8")).saturation == 2 / 32
    assert measured(x, QuantSpec("mxfp8", scale_rule="rceil")).saturated == 0
    x = torch.tensor([32768.0, 32769.0, -4e4, 5e4])
    assert measured(x, QuantSpec("hifp8")).saturated == 3
    assert measured(x, QuantSpec("hifp8", overflow="inf")).saturated == 3
    assert measured(x, QuantSpec("hifp8", tensor_scale=True)).saturated == 0


def test_a_short_last_block_adds_no_elements():
    x = torch.tensor([[511.0] + [1.0] * 33])
    found = measured(x, QuantSpec("mxfp8"))
    assert (found.elements, found.saturated, sum(found.scales.values())) == (34, 1, 2)


def test_a_lost_block_is_not_saturated():
    x = torch.ones(64)
    x[0] = torch.nan
    x[1] = 1e30
    found = measured(x, QuantSpec("mxfp8"))
    assert found.saturated == 0
    assert found.scales == {-8: 1, 128: 1}
    assert math.isnan(found.amax)
    assert math.isnan(found.sqnr_db)


def test_underflow_is_a_share_of_the_nonzero_elements():
    x = torch.tensor([448.0, 2.0**-12, 0.0, 0.0] + [0.0] * 28)
    found = measured(x, QuantSpec("mxfp8"))
    assert (found.underflowed, found.nonzero, found.underflow) == (1, 2, 0.5)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0)])
@pytest.mark.parametrize("kind", ["mxfp8", "hifp8"])
def test_an_empty_operand_is_measured_as_nothing(shape, kind):
    for axis in (0, 1):
        found = measured(torch.zeros(*shape), QuantSpec(kind), axis=axis)
        assert (found.elements, found.amax, found.sqnr_db) == (0, 0, None)
        assert (found.underflow, found.saturation) == (0, 0)


def test_ranks_merge_as_if_they_were_one_tensor():
    spec = QuantSpec("mxfp4")
    halves = [wide(8, 64, seed=seed) for seed in (1, 2)]
    (merged,) = merge([[measured(half, spec)] for half in halves])
    whole = measured(torch.cat(halves), spec)
    assert merged.scales == whole.scales
    assert (merged.amax, merged.saturated) == (whole.amax, whole.saturated)
    assert merged.sqnr_db == pytest.approx(whole.sqnr_db, abs=1e-9)


def test_a_nan_on_one_rank_stays_one():
    spec = QuantSpec("mxfp8")
    ranks = [[measured(torch.tensor([value]), spec)] for value in (torch.nan, 1.0)]
    for order in (ranks, ranks[::-1]):
        assert math.isnan(merge(order)[0].amax)


@pytest.mark.parametrize(
    "spec", [QuantSpec("mxfp4"), QuantSpec("hifp8"), QuantSpec("hifp8", tensor_scale=True)], ids=str
)
def test_measuring_asks_no_device_for_a_number(spec):
    """A tensor without data has none to give: whatever waited for one would fail."""
    x = torch.empty(40, 50, device="meta")
    sums = measure(x, x, spec, 0)
    assert {part.device.type for part in sums.add(sums)} == {"meta"}


@pytest.mark.parametrize("shape", [(0,), (7,), (1024,), (1025,), (3, 5, 7), (64, 1024), (33, 129)])
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_true_elements_are_counted_in_any_layout(shape, share):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share
    for view in (mask, mask.movedim(0, -1), mask[::2], mask.flatten()[1:]):
        count = count_true(view)
        assert count == torch.count_nonzero(view)
        assert (count.dtype, count.shape) == (torch.int64, ())


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1.0, 1e30])
def test_energies_of_tiny_and_huge_numbers_are_those_of_float64(size):
    x = torch.randn(33, 129, generator=torch.Generator().manual_seed(0)) * size
    for view in (x, x.t(), x[::2].repeat(2, 1)[:33]):
        expected = view.double().square().sum().item()
        found = Measurement.from_sums(
            KEY, measure(view, view, QuantSpec("mxfp8"), -1).flat().tolist()
        )
        assert found.signal == pytest.approx(expected, rel=1e-7)
        assert found.noise == 0
