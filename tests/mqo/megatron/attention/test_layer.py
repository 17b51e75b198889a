"""A whole attention layer with types at all ten sites, against the oracle, in fp32.

qkv = x w_qkv^T      query, key, value = parts of qkv      y = attention(query, key, value) w_o^T
"""

from functools import partial

import numpy as np
import pytest
import torch
from mqo.megatron.attention import chunks
from mqo.quant.formats import SITES
from mqo.quant.gemms import gemm_operands
from torch.nn import Parameter

from ....oracles.attention_recipes import along, attention
from ....oracles.elements import E2M1, E4M3, E5M2
from ....oracles.formats import fp8_block, fp8_tensor, hif4, int8_block, mx, nvfp4
from ....oracles.hadamard import NVIDIA_SIGNS, transform
from .conftest import Layer
from .typed import context_of, rows

layers = pytest.importorskip("megatron.core.tensor_parallel.layers")

LENGTH, BATCH, HEADS, GROUPS, WIDTH, K = 200, 2, 4, 2, 16, 96
FORMATS = {
    "mxfp8": partial(mx, element=E4M3, rule="floor"),
    "mxfp4": partial(mx, element=E2M1, rule="floor"),
    "nvfp4": nvfp4,
    "hif4": hif4,
    "fp8_block": fp8_block,
    "int8_block": int8_block,
}


def rounding(kind, points):
    """The numpy oracle's rounding along an axis, after a transform of attention's operands."""

    def rounded(site, operand, array, axis):
        if points and site not in ("fprop", "dgrad", "wgrad"):
            signs = np.tile(NVIDIA_SIGNS, points // 16)
            array = np.moveaxis(transform(np.moveaxis(array, axis, -1), signs), -1, axis)
        if kind == "none":
            return array
        if kind == "fp8_tensor":
            element = E5M2 if operand in ("grad", "ds") else E4M3
            return along(partial(fp8_tensor, element=element), array, axis)
        return along(FORMATS[kind], array, axis)

    return rounded


class Projection:
    """The three products of a linear layer by the oracle, for x [s, b, K] and weight [N, K]."""

    def __init__(self, x, weight, rounded):
        self.x, self.weight, self.rounded = x, weight, rounded

    def operands(self, site, lhs, rhs, axes):
        pair = zip((SITES[site].lhs, SITES[site].rhs), (lhs, rhs), axes, strict=True)
        return [self.rounded(site, n, array, axis).astype(np.float64) for n, array, axis in pair]

    def forward(self):
        x, weight = self.operands("fprop", self.x, self.weight, (-1, -1))
        return x @ weight.T

    def backward(self, grad):
        g, weight = self.operands("dgrad", grad, self.weight, (-1, 0))
        flat = (array.reshape(-1, array.shape[-1]) for array in (grad, self.x))
        of_tokens, x = self.operands("wgrad", *flat, (0, 0))
        return g @ weight, of_tokens.T @ x


def oracle_gradients(x, weights, grad, rounded):
    """The result, and the gradients of query, key, value, x and both weights."""
    qkv = Projection(x, weights[0], rounded)
    parts = np.split(qkv.forward(), [HEADS * WIDTH, (HEADS + GROUPS) * WIDTH], axis=-1)
    heads = [part.reshape(LENGTH, BATCH, -1, WIDTH) for part in parts]
    zero = np.zeros((LENGTH, BATCH, HEADS, WIDTH))
    scale = Layer().softmax_scale
    context = attention(*heads, zero, scale, rounded).context.reshape(LENGTH, BATCH, -1)
    out = Projection(context, weights[1], rounded)
    y = out.forward()
    of_context, of_out = out.backward(grad)
    of_heads = attention(*heads, of_context.reshape(zero.shape), scale, rounded)[1:]
    joined = np.concatenate([g.reshape(LENGTH, BATCH, -1) for g in of_heads], axis=-1)
    return y, *of_heads, *qkv.backward(joined), of_out


@pytest.fixture
def linear(monkeypatch):
    """The patched linear layer with a type for its three sites."""

    def apply(kind, x, weight):
        monkeypatch.setattr(
            layers, "gemm_operands", lambda site, _, owner: gemm_operands(site, kind, owner)
        )
        function = layers.LinearWithGradAccumulationAndAsyncCommunication
        return function.apply(x, weight, None, False, False, False, None, None, None, 1)

    return apply


def normal(*shape, seed, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Oracle and layer sum in another order, so that a number near a tie may round the other way: with
# mxfp4 and int8_block some do (measured: 1.2e-3), with the others none (5e-7). After a transform,
# the largest number of a query with few keys is near a power of two, where a scale changes (0.04).
@pytest.mark.parametrize("kind", ["none", *FORMATS, "fp8_tensor"])
@pytest.mark.parametrize("points", [0, 64])
def test_gradients_of_a_layer_are_the_oracles(linear, options, monkeypatch, kind, points):
    options(rows(f"hadamard = {points}") if points else "")
    monkeypatch.setitem(chunks.BUDGET, "cpu", 2 * 64 * LENGTH)
    x = normal(LENGTH, BATCH, K, seed=1).requires_grad_()
    sizes = ((HEADS + 2 * GROUPS) * WIDTH, K), (K, HEADS * WIDTH)
    weights = [Parameter(normal(*size, seed=2 + i, size=0.1)) for i, size in enumerate(sizes)]
    grad = normal(LENGTH, BATCH, K, seed=4, size=1e-3)
    qkv = linear(kind, x, weights[0])
    heads = [
        part.unflatten(-1, (-1, WIDTH))
        for part in qkv.split([HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH], dim=-1)
    ]
    y = linear(kind, context_of(dict.fromkeys(SITES, kind), *heads), weights[1])
    found = y, *torch.autograd.grad(y, [*heads, x, *weights], grad)
    arrays = (tensor.detach().numpy() for tensor in (x, *weights, grad))
    own, first, second, of_y = arrays
    expected = oracle_gradients(own, (first, second), of_y, rounding(kind, points))
    names = ("y", "query", "key", "value", "x", "w_qkv", "w_o")
    for name, one, other in zip(names, found, expected, strict=True):
        error = np.linalg.norm(one.detach().double().numpy() - other) / np.linalg.norm(other)
        assert error < (1e-6 if kind == "none" else 5e-2 if points else 5e-3), name
