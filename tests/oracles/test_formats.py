"""The oracles' formats against the stored results of other people's implementations."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from .elements import DRAW_BITS, E2M1, E2M3, E3M2, E4M3, E5M2
from .formats import (
    block_amax,
    fp8_block,
    fp8_tensor,
    hif4,
    mx,
    mxfp4_unbiased,
    mxfp4_unclipped,
    nvfp4,
    spread,
    ufp4,
)
from .hadamard import transform

VECTORS = Path(__file__).parents[1] / "vectors"
RECIPES, MX = (np.load(VECTORS / f"{name}_vectors.npz") for name in ("recipes", "mx"))
AMD = np.load(VECTORS / "mxfp4_hadamard.npz")
FORMATS = {
    "nvfp4_1x16": nvfp4,
    "nvfp4_16x16": partial(nvfp4, square=True),
    "fp8_1x128": fp8_block,
    "fp8_128x128": partial(fp8_block, square=True),
    "fp8_1x128_fp32scale": partial(fp8_block, power_of_two=False),
    "fp8_tensor_e4m3": partial(fp8_tensor, element=E4M3),
    "fp8_tensor_e5m2": partial(fp8_tensor, element=E5M2),
    "hif4": hif4,
    "mxfp6_e2m3": partial(mx, element=E2M3, rule="floor"),
    "mxfp6_e3m2": partial(mx, element=E3M2, rule="floor"),
}
KEYS = [key.split("/") for key in RECIPES if key.split("/")[0] in FORMATS]
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
RULES = {"floor": "ocp_exact_floor_rne", "rceil": "exact_rceil_rne", "even": "exact_even_rne"}


@pytest.mark.parametrize(("name", "case"), KEYS)
def test_formats_of_recipes_bit_for_bit(name, case):
    actual, expected = FORMATS[name](RECIPES[f"in/{case}"]), RECIPES[f"{name}/{case}"]
    assert actual.dtype == expected.dtype == np.float32
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(actual), ~numbers)
    assert np.array_equal(actual.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


def test_every_format_of_the_recipes_is_compared():
    assert {name for name, _ in KEYS} == set(FORMATS)
    assert len(KEYS) == 5 * len(FORMATS) + 1  # hif4 has a case more


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("case", ["normal", "tie_grid", "special_blocks", "normal_bf16"])
def test_mx_bit_for_bit_where_blocks_are_finite(rule, name, case):
    x, expected = MX[f"in__{case}"], MX[f"{RULES[rule]}__{name}__{case}"]
    rows = np.isfinite(x).all(axis=1)
    assert rows.sum() >= 4
    actual = mx(x[rows], ELEMENTS[name], rule)
    assert np.array_equal(actual.view(np.uint32), expected[rows].view(np.uint32))


@pytest.mark.parametrize("key", [key for key in AMD if not key.startswith("in/")])
def test_amds_mxfp4_is_the_rule_even_but_for_ties(key):
    """Theirs rounds a tie away from zero, and E2M1 to the even code."""
    kind, case, way = key.split("/")
    x = AMD[f"in/{case}"] if way == "rows" else np.ascontiguousarray(AMD[f"in/{case}"].T)
    x = transform(x, np.ones(16)) if kind == "hadamard" else x
    ours, theirs = mx(x, E2M1, "even").astype(np.float64), AMD[key].astype(np.float64)
    assert np.array_equal(np.abs(ours - x), np.abs(theirs - x))
    assert (np.abs(ours) <= np.abs(theirs)).all()
    assert (ours == theirs).mean() > 0.9 and (case != "ties" or (ours != theirs).sum() > 30)


def test_a_scale_that_never_clips_is_rceil_of_three_quarters():
    """A power of two, as amax itself, has no smaller one that takes it to 6 or below."""
    x = np.random.default_rng(8).standard_normal((64, 64)).astype(np.float32)
    x[:8, :32] = np.ldexp(np.float32(1), np.arange(32) - 20)
    same = mx((np.float32(0.75) * x).astype(np.float32), E2M1, "rceil") / np.float32(0.75)
    assert np.array_equal(mxfp4_unclipped(x), same)
    top = 2.0 ** np.ceil(np.log2(spread(block_amax(x, 32), 32, x).astype(np.float64)))
    assert (np.abs(same - x) <= top / 6 * 1.01).all()  # half of the widest step, from 4 to 6


def test_the_authors_weights_differ_where_amax_is_below_their_share_of_the_scale():
    x = np.random.default_rng(9).standard_normal((256, 256)).astype(np.float32)
    x *= spread(2.0 ** np.random.default_rng(10).uniform(0, 1, (256, 8)), 32, x).astype(np.float32)
    ours, theirs = (mxfp4_unclipped(x, square=True, least=least) for least in (0.0, 0.87))
    amax = block_amax(x, 32, square=True)
    low = spread(amax < 0.87 * 2.0 ** np.ceil(np.log2(amax)), 32, x)
    assert low.any() and not low.all()
    assert np.array_equal(ours[~low], theirs[~low])
    assert (ours != theirs)[low].any()


def test_ufp4_has_fifteen_values_at_equal_distances():
    x = np.random.default_rng(11).standard_normal((8, 64)).astype(np.float32)
    step = spread(block_amax(x, 16), 16, x).astype(np.float64) / 7
    codes = ufp4(x) / step
    assert np.abs(codes - np.rint(codes)).max() < 1e-5
    assert {*np.rint(codes).astype(int).ravel()} == set(range(-7, 8))
    assert np.abs(ufp4(x) - x).max() <= (step / 2 * (1 + 1e-5)).max()


def test_a_short_last_block_is_one_filled_with_zeros():
    x = np.random.default_rng(1).standard_normal((33, 250)).astype(np.float32)
    filled = np.pad(x, ((0, 127), (0, 6)))
    rows = (partial(mx, element=E4M3, rule="rceil"), hif4, ufp4)
    for quantize in (*rows, *list(FORMATS.values())[:4]):
        assert np.array_equal(quantize(x), quantize(filled)[:33, :250])


# -- stochastic rounding -----------------------------------------------------------------------


def even_draws(shape, number):
    """Draws for `number` matrices: each element's, over all of them, are spread evenly."""
    step = 2**DRAW_BITS // number
    first = np.random.default_rng(2).integers(0, 2**DRAW_BITS, shape)
    return [(first + i * step) % 2**DRAW_BITS for i in range(number)]


def test_mxfp4_of_three_quarters_is_unbiased_also_at_the_top_of_a_block():
    x = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    top = 2.0 ** np.floor(np.log2(np.abs(x).reshape(8, 2, 32).max(axis=2))).repeat(32, axis=1)
    assert (np.abs(x) > 1.5 * top).any()  # what the rule 'floor' clips
    results = [mxfp4_unbiased(x, draws) for draws in even_draws(x.shape, 512)]
    # Evenly spread draws miss a share by 1/512 at most; a step is half of `top` or less.
    assert (np.abs(np.mean(results, axis=0) - x) <= top / 2 / 0.75 / 512 * 1.01).all()


def test_a_deterministic_rounding_is_what_draws_below_and_above_a_half_enclose():
    x = np.random.default_rng(4).standard_normal((16, 64)).astype(np.float32)
    down, up = (
        nvfp4(x, draws=np.full(x.shape, draw)).astype(np.float64) for draw in (2**DRAW_BITS - 1, 0)
    )
    near = nvfp4(x)
    assert ((near == down) | (near == up)).all()
    assert (np.abs(down) <= np.abs(near)).all()
    assert (np.abs(near) <= np.abs(up)).all()
