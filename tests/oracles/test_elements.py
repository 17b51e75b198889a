"""The oracles' elements against ml_dtypes' casts, and their stochastic rounding."""

import ml_dtypes
import numpy as np
import pytest

from .elements import DRAW_BITS, E2M1, E2M3, E3M2, E4M3, E5M2, bfloat16, nearest, stochastic

THEIRS = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E3M2: ml_dtypes.float6_e3m2fn,
}
every_element = pytest.mark.parametrize("element", THEIRS, ids=lambda e: THEIRS[e].__name__)


def around(element):
    """The element's values, the middles between them, and the float32 next to each of both."""
    middles = (element.grid[1:] + element.grid[:-1]) / 2
    points = np.concatenate([element.grid, middles]).astype(np.float32)
    near = [np.nextafter(points, np.float32(to)) for to in (-np.inf, np.inf)]
    x = np.concatenate([points, *near])
    x = np.concatenate([x, -x])
    return x[np.abs(x) <= element.largest]


@every_element
def test_nearest_is_ml_dtypes_cast_up_to_the_largest_value(element):
    x = around(element)
    assert len(x) > 4 * len(element.grid)
    assert np.array_equal(nearest(x, element), x.astype(THEIRS[element]).astype(np.float64))


@every_element
def test_beyond_the_largest_value_it_saturates(element):
    assert nearest(np.array([1e30, -1e30]), element).tolist() == [element.largest, -element.largest]


@every_element
def test_draws_decide_between_the_neighbors(element):
    low, high = element.grid[len(element.grid) // 2 :][:2]
    draws = np.arange(0, 2**DRAW_BITS, 2**10)
    for share in (0.0, 0.25, 0.375):
        x = np.full(len(draws), low + share * (high - low))
        rounded = stochastic(x, element, draws)
        assert set(rounded) <= {low, high}
        assert (rounded == high).mean() == share
        assert np.array_equal(stochastic(-x, element, draws), -rounded)


def test_a_draw_equal_to_the_share_stays():
    draws = np.array([2**22 - 1, 2**22])
    assert stochastic(np.array([1.125, 1.125]), E2M1, draws).tolist() == [1.5, 1.0]


def test_bfloat16_is_ml_dtypes_cast():
    bits = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    x = bits.view(np.float32)
    ties = ((bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)).view(np.float32)
    for values in (x, ties):
        finite = values[np.isfinite(values)]
        with np.errstate(over="ignore"):
            theirs = finite.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(bfloat16(finite).view(np.uint32), theirs.view(np.uint32))
