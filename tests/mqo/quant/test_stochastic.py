"""Stochastic rounding: the generator, the seeds, where each element's draw comes from, no bias."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant import stochastic
from mqo.quant.backend import fake_quantize
from mqo.quant.gemms import gemm_operands
from mqo.quant.progress import set_step
from mqo.quant.reference import qdq
from mqo.quant.spec import QuantSpec

# Of each kind, the mantissa bits of 1 in a block whose amax is a power of two up to 4.
MANTISSA = {"mxfp8": 3, "mxfp8_e5m2": 2, "mxfp6_e2m3": 3, "mxfp6_e3m2": 2, "mxfp4": 1, "hifp8": 3}
KINDS = tuple(MANTISSA)
every_kind = pytest.mark.parametrize("kind", KINDS)
SITE = {"step": 0, "micro_batch": 0, "shard": 0}
SITE |= {"site": "fprop", "operand": "x", "layer": "decoder.layers.0"}


def splitmix64(seed, count):
    """The published generator, in Python's own integers."""
    mask, state = 2**64 - 1, seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        yield z ^ (z >> 31)


# -- draws -------------------------------------------------------------------------------------


def test_the_generator_is_splitmix64():
    # The first outputs for the seed 1234567, as published with the generator.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert list(splitmix64(1234567, 3)) == published
    expected = [output >> 40 for output in published]
    assert stochastic.draws(torch.Size([3]), 1234567).tolist() == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**64 - 1))
def test_element_i_draws_the_top_bits_of_output_i(seed):
    drawn = stochastic.draws(torch.Size([3, 5]), seed)
    assert drawn.flatten().tolist() == [output >> 40 for output in splitmix64(seed, 15)]


def test_an_empty_tensor_draws_nothing():
    assert stochastic.draws(torch.Size([0, 4]), 1).shape == (0, 4)


# -- seeds -------------------------------------------------------------------------------------


def test_the_seed_is_a_known_function_of_its_arguments():
    # A changed value would make old runs unrepeatable.
    assert stochastic.derive_seed(0, **SITE) == 9486200398002965830
    assert 0 <= stochastic.derive_seed(2**64 - 1, **SITE) < 2**64


def test_every_argument_changes_the_seed():
    others = {
        "step": 1,
        "micro_batch": 1,
        "shard": 1,
        "site": "dgrad",
        "operand": "weight",
        "layer": "x",
    }
    seeds = {stochastic.derive_seed(base, **SITE) for base in (0, 1)}
    seeds |= {stochastic.derive_seed(0, **SITE | {name: v}) for name, v in others.items()}
    assert len(seeds) == 8


def test_operands_are_seeded_by_run_step_and_place(options):
    options('[quantizer]\nrounding = "stochastic"\nseed = 9\n')
    x, spec = torch.randn(64, 64), QuantSpec("mxfp4", rounding="stochastic")
    for step in (0, 3):
        set_step(step)
        place = SITE | {"step": step, "layer": "unlabeled"}
        for quantize, operand in (("lhs", "x"), ("rhs", "weight")):
            seed = stochastic.derive_seed(9, **place | {"operand": operand})
            set_step(step)
            actual = getattr(gemm_operands("fprop", "mxfp4", None), quantize)(x)
            assert actual.equal(fake_quantize(x, spec, seed=seed))


# -- rounding ----------------------------------------------------------------------------------


@every_kind
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.permutations(range(3)), st.integers(0, 2), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_strides_do_not_change_what_an_element_draws(assert_same_bits, kind, order, axis, dtype):
    spec = QuantSpec(kind, rounding="stochastic", block=16)
    x = torch.randn(6, 20, 34, generator=torch.Generator().manual_seed(2)).to(dtype)
    strided = x.permute(order).contiguous().permute([order.index(i) for i in range(3)])
    assert_same_bits(qdq(strided, spec, axis, seed=11), qdq(x, spec, axis, seed=11))


@every_kind
def test_a_draw_equal_to_the_share_stays_and_one_below_it_goes_up(kind):
    # Shares of float32 between 1 and 1 + step are multiples of these, of 2^24.
    bits = MANTISSA[kind]
    unit = 2 ** (bits + 1)
    draw, seed = next(
        (draw, seed)
        for seed in range(1000)
        if (draw := next(splitmix64(seed, 1)) >> 40) % unit == 0
    )
    spec = QuantSpec(kind, rounding="stochastic")
    for share, expected in ((draw, 1.0), (draw + unit, 1 + 2.0**-bits)):
        x = torch.tensor([1 + share * 2.0 ** -(24 + bits), 1.0])
        assert qdq(x, spec, seed=seed)[0] == expected


def test_a_value_of_the_format_stays_even_if_it_draws_zero():
    seed = 2**64 - 0x9E3779B97F4A7C15  # whose first output is 0
    assert stochastic.draws(torch.Size([1]), seed) == 0
    assert qdq(torch.tensor([1.0]), QuantSpec("hifp8", rounding="stochastic"), seed=seed) == 1.0


# Each stands in a block whose amax is 4, so that its step is the same in every format.
@every_kind
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("share", [0.03125, 0.25, 0.5, 0.8125, 1 / 3])
def test_the_mean_is_the_value_itself(kind, sign, share):
    step = 2.0 ** -MANTISSA[kind]
    value = sign * (1 + share * step)
    x = torch.full((2**13, 32), value)
    x[:, 0] = 4.0
    rounded = qdq(x, QuantSpec(kind, rounding="stochastic"), seed=17)[:, 1:].double()
    assert set(rounded.unique().tolist()) == {sign * 1.0, sign * (1 + step)}
    sigma = step * math.sqrt(share * (1 - share) / rounded.numel())
    assert abs(rounded.mean().item() - value) < 4 * sigma
