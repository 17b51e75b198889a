"""SageBwd as a layer whose operands are rounded, against its two algorithms."""

import numpy as np
import pytest

from .attention_recipes import RECIPES, attention, sagebwd

LENGTH, WIDTH = 300, 32  # the last tile has 44 tokens


@pytest.fixture(scope="module")
def tensors():
    """Query, key, value and gradient of the context, [n, d]."""
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((LENGTH, WIDTH)) for _ in range(4)]
    arrays[1] += 3  # the keys have a mean
    return [array.astype(np.float32).astype(np.float64) for array in arrays]


def errors(found, expected):
    pairs = zip(found, expected, strict=True)
    return [np.linalg.norm(a.reshape(b.shape) - b) / np.linalg.norm(b) for a, b in pairs]


def layer(tensors, rounded=RECIPES["sagebwd"]):
    return attention(*(array[:, None, None] for array in tensors), 1.0, rounded)


def test_a_layer_of_rounded_operands_is_the_algorithm(tensors):
    # Scales and probabilities are float32 in one of them; measured: 2.4e-7.
    assert max(errors(layer(tensors), sagebwd(*tensors, "P dP"))) < 2e-6


def test_the_published_row_sums_change_the_gradients_of_query_and_key_alone(tensors):
    own, published = (sagebwd(*tensors, sums) for sums in ("P dP", "dO O"))
    context, query, key, value = errors(own, published)
    assert context == value == 0
    assert 1e-4 < query < 0.05
    assert 1e-4 < key < 0.05


def test_int8_is_near_the_unquantized_layer(tensors):
    exact = layer(tensors, lambda site, operand, array, axis: array)
    # The paper's table 1 has 0.016, 0.018, 0.022 and 0.016 for normal numbers.
    assert all(0.005 < error < 0.06 for error in errors(layer(tensors), exact))
