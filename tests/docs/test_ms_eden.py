"""recipes/ms_eden.py: Algorithm 1 of arXiv 2601.22813, and what the paper says of it."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from mqo.project import Project
from mqo.quant import QuantSpec, check_quantizer, fake_quantize, quantize_model, sqnr
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.stochastic import split_seed
from torch import nn

from ..oracles.compared import documented
from ..oracles.elements import E2M1, E4M3, nearest
from .training import losses_of

FILE = Project.here().root / "tools/mqo/quant/recipes/ms_eden.py"
F32 = np.float32
GRADIENTS = {
    "one operand": """
        types = { fprop = "nvfp4", dgrad = "nvfp4", wgrad = "nvfp4" }
        [operands]
        "dgrad.grad" = { quant_type = "ms_eden" }
        "wgrad.grad" = { quant_type = "ms_eden" }
    """,
    "both operands": """
        types = { fprop = "nvfp4", dgrad = "ms_eden", wgrad = "ms_eden" }
    """,
}


@pytest.fixture(autouse=True)
def ms_eden():
    load_quantizers(FILE)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- Algorithm 1, number by number, from the paper -------------------------------------------------


def bits(seed, index):
    """The 24 bits of an element: output `index` of SplitMix64."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 40


def hadamard(values):
    """Sums and differences of float32 numbers whose indices differ in one bit, for each bit."""
    values = [F32(v) for v in values]
    for bit in range(7):
        for i in range(128):
            if not i >> bit & 1:
                j = i | 1 << bit
                values[i], values[j] = values[i] + values[j], values[i] - values[j]
    return [v * F32(128**-0.5) for v in values]


def stochastic_e4m3(value, draw):
    value = min(value, 448.0)
    lower = max(i for i, point in enumerate(E4M3.grid) if point <= value)
    if E4M3.grid[lower] == value:
        return value
    below, above = E4M3.grid[lower : lower + 2]
    return above if draw < (value - below) / (above - below) else below


def quantized_groups(y, s, draws):
    """128 numbers in units of the tensor's scale -> their values after `Q` and the correction."""
    values = []
    for g in range(8):
        group = y[16 * g : 16 * g + 16]
        scale = F32(nearest(max(abs(v) for v in group) / F32(s), E4M3)) or F32(1.0)
        scaled = [v / scale for v in group]
        rounded = [float(nearest(v, E2M1)) for v in scaled]
        overlap = math.fsum(float(v) * q for v, q in zip(scaled, rounded, strict=True))
        squares = math.fsum(float(v) * float(v) for v in scaled)
        correction = squares / overlap if overlap else 1.0
        scale = F32(stochastic_e4m3(correction * float(scale), draws[g]))
        values += [F32(q) * scale for q in rounded]
    return values


def by_definition(x, seed, gain=0.93, rotate=True):
    """Float32 [rows, K] -> the result of Algorithm 1, rotated back."""
    rows, size = x.shape
    s = 6 * 16 / 17 / gain
    alpha = F32(np.abs(x).max()) * F32((8 if rotate else 1) / (256 * s))
    result = np.zeros((rows, -(-size // 128) * 128), F32)
    for row, start in product(range(rows), range(0, size, 128)):
        length = min(128, size - start)
        block = [x[row, start + i] / alpha if i < length else F32(0) for i in range(128)]
        numbers = [bits(seed, row * size + start + i) for i in range(length)]
        numbers += [
            bits(split_seed(seed, 0), row * result.shape[1] + start + i) for i in range(length, 128)
        ]
        signs = [F32(-1 if numbers[i] >> 23 else 1) for i in range(128)]
        draws = [(numbers[16 * g] % 2**23) / 2**23 for g in range(8)]
        if rotate:
            block = hadamard([sign * v for sign, v in zip(signs, block, strict=True)])
        values = quantized_groups(block, s, draws)
        if rotate:
            values = [sign * v for sign, v in zip(signs, hadamard(values), strict=True)]
        result[row, start : start + 128] = values
    return alpha * result[:, :size]


def test_the_rotation_of_the_definition_is_sylvesters_matrix():
    x = normal(128).numpy()
    matrix = [[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    expected = np.array(matrix) @ x.astype(np.float64) / math.sqrt(128)
    assert np.abs(hadamard(x) - expected).max() < 1e-6  # seven roundings of numbers near 1


SIZES = {"normal": 256, "outliers": 256, "small blocks": 256, "padded": 40}
CHOICES = ({}, {"gain": 1.0}, {"rotate": False}, {"gain": 0.5, "rotate": False})  # that exceeds 448


def test_the_number_of_compared_values_is_the_documented_one():
    assert documented("ms-eden") == len(CHOICES) * sum(6 * size for size in SIZES.values())


@pytest.mark.parametrize("options", CHOICES)
@pytest.mark.parametrize("data", SIZES)
def test_it_is_the_definition_bit_for_bit(data, options):
    x = normal(6, SIZES[data])
    if data == "outliers":
        x[:, ::64] *= 50
    if data == "small blocks":
        x *= torch.logspace(-9, 0, 6).unsqueeze(1)  # of E4M3's subnormals, and rounded to zero
        x[5, 128:] = 0
    ours = fake_quantize(x, QuantSpec("ms_eden", options=options), seed=7)
    assert ours.equal(torch.from_numpy(by_definition(x.numpy(), 7, **options)))


def test_ties_go_to_even():
    options = {"gain": 16 / 17, "rotate": False}  # the amax of a group becomes 6
    x = torch.zeros(1, 128)
    x[0, :8] = 256 * torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5.0])
    result = fake_quantize(x, QuantSpec("ms_eden", options=options), seed=0)
    assert (result[0, :8] / result[0, 0] * 6).tolist() == [6, 0, 1, 1, 2, -2, 4, 4]
    assert result.equal(torch.from_numpy(by_definition(x.numpy(), 0, **options)))


def test_a_row_does_not_depend_on_the_other_rows():
    x = normal(300, 256)  # more than a piece of a thread
    whole = fake_quantize(x, "ms_eden", seed=1)
    part = fake_quantize(x[:7], "ms_eden", seed=1, amax=x.abs().amax())
    assert part.equal(whole[:7])


# -- what the paper says ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [256, 40])
def test_it_is_unbiased(size):
    x, count = normal(8, size), 1500
    draws = torch.stack([fake_quantize(x, "ms_eden", seed=s) for s in range(count)]).double()
    error = (draws.mean(0) - x) / (draws.std(0) / count**0.5)
    # Sums of squares of N(0, 1), and of their products with signs; by chance once in 10^6.
    assert abs((error**2).mean() - 1) < 5 * (2 / x.numel()) ** 0.5
    assert abs((error * x.sign()).sum()) < 5 * x.numel() ** 0.5
    # EDEN's guarantee, for rotations of any size.
    along = (draws * x).sum(2) / (x * x).sum(1)
    assert ((along.mean(0) - 1).abs() < 5 * along.std(0) / count**0.5).all()


def test_two_elements_that_are_not_zero_have_the_known_bias():
    """For e0 + e1/10, y is ±1.1 and ±0.9 over sqrt(128): E2M1 has 6 and 4 for them.

    So S = (1.1² + 0.9²) / (1.1 · 6 + 0.9 · 4), and the first element is 5 S = 101/102 on average.
    """
    x = torch.zeros(20_000, 128)
    x[:, 0], x[:, 1] = 1.0, 0.1
    amax = torch.tensor(32 * 1.1 / 128**0.5 / 3)  # so that the scale is 3, without rounding
    result = fake_quantize(x, "ms_eden", seed=0, amax=amax).double()
    # The scale is rounded to 3.25 or 3.5, so the standard deviation is at most 4 %.
    assert result[:, 0].mean().item() == pytest.approx(101 / 102, abs=5 * 0.04 / 20_000**0.5)
    assert result[:, 1].mean().item() == pytest.approx(101 / 510, abs=5 * 0.04 / 20_000**0.5)


def test_its_squared_error_is_half_of_that_of_stochastic_rounding():
    x = normal(256, 512)
    stochastic = sqnr(x, QuantSpec("nvfp4", rounding="stochastic"), seed=0)
    assert 2.8 < sqnr(x, "ms_eden", seed=0) - stochastic < 3.3  # 3.0 dB are a half
    assert abs(sqnr(x, "ms_eden", seed=0) - sqnr(x, "nvfp4")) < 0.3


def test_a_gain_of_093_has_less_error_than_others():
    x = normal(256, 512)
    errors = {g: -sqnr(x, QuantSpec("ms_eden", options={"gain": g}), seed=0) for g in (0.8, 1.0)}
    assert min(errors.values()) > -sqnr(x, "ms_eden", seed=0) + 0.2


# -- as a plugin -----------------------------------------------------------------------------------


def test_it_passes_the_check_and_is_found_unbiased():
    report = check_quantizer("ms_eden")
    assert report.passed
    faults = {finding.check: finding.fault for finding in report.findings}
    assert faults["stochastic rounding is unbiased"] == ""


@pytest.mark.parametrize("recipe", GRADIENTS)
def test_a_model_trains_with_it_on_gradients(recipe, tmp_path):
    (tmp_path / "own.toml").write_text(GRADIENTS[recipe])
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    quantize_model(model, tmp_path / "own.toml")
    losses = losses_of(model, normal(64, 32), 20)
    assert losses[-1] < 0.7 * losses[0]
