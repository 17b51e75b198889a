"""The products of attention's backward pass, by their definition, in float64.

Heads are [s, b, h, d]; the h of query are a multiple of those of key and value. Matrices of scores
are [b, h, sq, sk]. With S = scale query key^T, P = softmax(S) over the keys that a query sees, and
the gradient G of P value:

    dvalue = P^T G      dP = G value^T      dS = P * (dP - sum of P * dP over the keys)
    dquery = scale dS key      dkey = scale dS^T query

The gradients of a key and of a value are summed over the query heads that share it. `rounded`
rounds an operand along the axis that its product sums over.
"""

from collections.abc import Callable

import numpy as np

# (site, operand, array, axis that the product sums over) -> the rounded array
Rounded = Callable[[str, str, np.ndarray, int], np.ndarray]


def probabilities(query: np.ndarray, key: np.ndarray, scale: float, rounded: Rounded) -> np.ndarray:
    """The recomputed probabilities of causal attention."""
    query = _wide(rounded("qk_recompute", "query", query, -1))
    key = _wide(rounded("qk_recompute", "key", key, -1))
    scores = scale * np.einsum("qbhd,kbhd->bhqk", query, _shared(key, query))
    seen = np.tril(np.ones(scores.shape[-2:], dtype=bool))
    powers = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return powers / powers.sum(-1, keepdims=True)


def of_scores(
    probs: np.ndarray, grad: np.ndarray, value: np.ndarray, rounded: Rounded
) -> np.ndarray:
    """The gradient of the scores, dS."""
    grad = _wide(rounded("dp", "grad", grad, -1))
    value = _shared(_wide(rounded("dp", "value", value, -1)), grad)
    of_probs = np.einsum("qbhd,kbhd->bhqk", grad, value)
    probs = _wide(probs)
    return probs * (of_probs - (probs * of_probs).sum(-1, keepdims=True))


def of_value(probs: np.ndarray, grad: np.ndarray, heads: int, rounded: Rounded) -> np.ndarray:
    """The gradient of the values, which have this many heads."""
    probs = _wide(rounded("dv", "probs", probs, -2))
    grad = _wide(rounded("dv", "grad", grad, 0))
    return _summed(np.einsum("bhqk,qbhd->kbhd", probs, grad), heads)


def of_query(scores: np.ndarray, key: np.ndarray, scale: float, rounded: Rounded) -> np.ndarray:
    """The gradient of the queries, from that of the scores."""
    heads = scores.shape[1]
    scores = _wide(rounded("dq", "ds", scores, -1))
    key = _wide(rounded("dq", "key", key, 0)).repeat(heads // key.shape[2], axis=2)
    return scale * np.einsum("bhqk,kbhd->qbhd", scores, key)


def of_key(
    scores: np.ndarray, query: np.ndarray, scale: float, heads: int, rounded: Rounded
) -> np.ndarray:
    """The gradient of the keys, which have this many heads, from that of the scores."""
    scores = _wide(rounded("dk", "ds", scores, -2))
    query = _wide(rounded("dk", "query", query, 0))
    return _summed(scale * np.einsum("bhqk,qbhd->kbhd", scores, query), heads)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _shared(heads: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Give each head of the query its key or value."""
    return heads.repeat(query.shape[2] // heads.shape[2], axis=2)


def _summed(grads: np.ndarray, heads: int) -> np.ndarray:
    """Sum over the query heads that share a key or a value."""
    s, b, h, d = grads.shape
    return grads.reshape(s, b, heads, h // heads, d).sum(3)
