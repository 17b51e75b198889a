"""The oracles' transform: the matrix it stands for, its inverse, padding."""

import numpy as np
import pytest

from .hadamard import NVIDIA_SIGNS, sylvester, transform

SIGNS = {
    16: NVIDIA_SIGNS,
    64: 1.0 - 2.0 * np.random.default_rng(0).integers(0, 2, 64),
}
every_size = pytest.mark.parametrize("signs", SIGNS.values(), ids=SIGNS)


def normal(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_sylvesters_matrix_is_orthogonal_and_as_published():
    assert np.array_equal(sylvester(2), [[1, 1], [1, -1]])
    assert np.array_equal(sylvester(4)[3], [1, -1, -1, 1])
    for points in (16, 64):
        h = sylvester(points)
        assert np.array_equal(h @ h.T, points * np.eye(points))


@every_size
def test_it_is_the_product_with_the_matrix(signs):
    x, points = normal(12, 3 * len(signs)), len(signs)
    matrix = np.diag(signs) @ sylvester(points) / np.sqrt(points)
    expected = (x.reshape(-1, points).astype(np.float64) @ matrix).reshape(x.shape)
    # log2(points) float32 sums, of less than the block's l1 norm, and one product.
    assert np.abs(transform(x, signs) - expected).max() < 2.0**-21


@every_size
def test_small_integers_are_exact(signs):
    x = np.random.default_rng(2).integers(-64, 65, (5, len(signs))).astype(np.float32)
    expected = (x * signs) @ sylvester(len(signs)) / np.sqrt(len(signs))
    assert np.array_equal(transform(x, signs), expected)


@every_size
def test_it_cancels_in_a_product_and_zeros_fill_the_last_block(signs):
    x, w = normal(6, 5 * len(signs) + 7), normal(9, 5 * len(signs) + 7)
    left, right = (transform(m, signs).astype(np.float64) for m in (x, w))
    assert left.shape[1] == 6 * len(signs)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    assert np.abs(left @ right.T - expected).max() < 1e-6 * np.abs(expected).max()
