"""Published recipes for the products of attention, in numpy, from their descriptions alone.

`rounding` gives what each product multiplies, and `attention` the result and the gradients of a
causal layer that multiplies it, by attention_backward.py. `sagebwd` is SageBwd's two algorithms,
tile by tile. Heads are [s, b, h, d], and matrices of scores [b, h, sq, sk].
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from . import attention_backward as backward
from .attention_backward import Rounded
from .elements import E4M3, E5M2
from .formats import fp8_tensor, int8_block

TILE = 128


class Gradients(NamedTuple):
    """The context of a layer, and the gradients of what it is computed from."""

    context: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad: np.ndarray,
    scale: float,
    rounded: Rounded,
) -> Gradients:
    """Causal attention whose products multiply what `rounded` returns; `grad` is [s, b, h, d]."""
    heads = key.shape[2]

    def forward(site: str, operand: str, array: np.ndarray, axis: int) -> np.ndarray:
        return rounded("qk", operand, array, axis)

    probs = rounded("pv", "probs", backward.probabilities(query, key, scale, forward), -1)
    values = rounded("pv", "value", value, 0).astype(np.float64)
    values = values.repeat(query.shape[2] // heads, axis=2)
    context = np.einsum("bhqk,kbhd->qbhd", probs.astype(np.float64), values)
    again = backward.probabilities(query, key, scale, rounded)
    ds = backward.of_scores(again, grad, value, rounded)
    return Gradients(
        context,
        backward.of_query(ds, key, scale, rounded),
        backward.of_key(ds, query, scale, heads, rounded),
        backward.of_value(again, grad, heads, rounded),
    )


def along(quantize: Callable[[np.ndarray], np.ndarray], array: np.ndarray, axis: int) -> np.ndarray:
    """Quantize rows [..., contraction] of an array of any shape along an axis."""
    moved = np.moveaxis(np.asarray(array, dtype=np.float32), axis, -1)
    rows = np.ascontiguousarray(moved).reshape(-1, moved.shape[-1])
    return np.moveaxis(quantize(rows).reshape(moved.shape), -1, axis)


def of_heads(quantize: Callable[[np.ndarray], np.ndarray], array: np.ndarray, is_of_scores: bool):
    """Quantize the matrix of each head of each sequence, in squares."""
    array = np.asarray(array, dtype=np.float32)
    matrices = array if is_of_scores else array.transpose(1, 2, 0, 3)
    rows = matrices.reshape(-1, *matrices.shape[-2:])
    result = np.stack([quantize(np.ascontiguousarray(m)) for m in rows]).reshape(matrices.shape)
    return result if is_of_scores else result.transpose(2, 0, 1, 3)


def smoothed(key: np.ndarray) -> np.ndarray:
    """Subtract the mean over tokens."""
    return key.astype(np.float64) - key.astype(np.float64).mean(0, keepdims=True)


def _sagebwd(site: str, operand: str, array: np.ndarray, axis: int) -> np.ndarray:
    """SageBwd: INT8 tiles, but P per token in the forward pass; dP = dO V^T is not quantized."""
    if site == "dp":
        return array
    if (site, operand) == ("pv", "probs"):
        return along(int8_block, array, -1)
    array = smoothed(array) if operand == "key" else array
    return of_heads(partial(int8_block, square=True), array, operand in ("probs", "ds"))


def _fp8(site: str, operand: str, array: np.ndarray, axis: int) -> np.ndarray:
    """Transformer Engine's HYBRID: E5M2 for gradients, E4M3 for the rest, a scale per tensor."""
    # The recipe is for causal masks, whose first query gives its only key the probability 1.
    element = E5M2 if operand in ("grad", "ds") else E4M3
    array = np.asarray(array, dtype=np.float32)
    return fp8_tensor(array.reshape(-1, array.shape[-1]), element).reshape(array.shape)


RECIPES: dict[str, Rounded] = {"sagebwd": _sagebwd, "fp8-tensorwise-attention": _fp8}


# -- SageBwd's algorithms ----------------------------------------------------------------------


class Quantized(NamedTuple):
    """Integers and their scale, the psi of the paper."""

    codes: np.ndarray
    scale: float


def psi(x: np.ndarray) -> Quantized:
    """Return round(x / delta) and delta = max |x| / 127."""
    delta = np.abs(x).max() / 127
    return Quantized(np.rint(x / delta) if delta else np.zeros_like(x), delta)


def sagebwd(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad: np.ndarray,
    row_sums: str,
) -> Gradients:
    """Algorithms 1 and 2 for one causal head, [n, d] each; the query includes the softmax scale.

    `row_sums` says what is subtracted from dP: 'dO O' as published, or 'P dP'.
    """
    key = key - key.mean(0)
    tiles = [slice(i, i + TILE) for i in range(0, len(key), TILE)]
    q, k, v, d_o = ([psi(x[tile]) for tile in tiles] for x in (query, key, value, grad))

    def scores(i: int, j: int) -> np.ndarray:
        product = q[i].codes @ k[j].codes.T * (q[i].scale * k[j].scale)
        rows, columns = np.arange(len(key))[tiles[i]], np.arange(len(key))[tiles[j]]
        return np.where(columns <= rows[:, None], product, -np.inf)

    context, sums = np.zeros(value.shape), np.zeros((len(key), 1))
    for i, rows in enumerate(tiles):
        largest, total, out = -np.inf, 0.0, 0.0
        for j in range(i + 1):
            s = scores(i, j)
            before, of_tile = largest, s.max(-1, keepdims=True)
            largest = np.maximum(before, of_tile)
            shrink, p = np.exp(before - largest), np.exp(s - largest)
            total = shrink * total + p.sum(-1, keepdims=True)
            delta = np.exp(of_tile - largest) / 127
            codes = np.rint(np.divide(p, delta, out=np.zeros_like(p), where=delta > 0))
            out = shrink * out + codes @ v[j].codes * delta * v[j].scale
        context[rows], sums[rows] = out / total, largest + np.log(total)

    of_query, of_key, of_value = (np.zeros(x.shape) for x in (query, key, value))
    subtracted = (grad * context).sum(-1, keepdims=True)
    if row_sums == "P dP":
        for i, rows in enumerate(tiles):
            probs = [np.exp(scores(i, j) - sums[rows]) for j in range(i + 1)]
            products = [p * (grad[rows] @ value[tiles[j]].T) for j, p in enumerate(probs)]
            subtracted[rows] = sum(p.sum(-1, keepdims=True) for p in products)
    for j, columns in enumerate(tiles):
        for i, rows in list(enumerate(tiles))[j:]:
            probs = np.exp(scores(i, j) - sums[rows])
            p = psi(probs)
            of_value[columns] += p.codes.T @ d_o[i].codes * (p.scale * d_o[i].scale)
            ds = psi(probs * (grad[rows] @ value[columns].T - subtracted[rows]))
            of_query[rows] += ds.codes @ k[j].codes * (ds.scale * k[j].scale)
            of_key[columns] += ds.codes.T @ q[i].codes * (ds.scale * q[i].scale)
    return Gradients(context, of_query, of_key, of_value)
