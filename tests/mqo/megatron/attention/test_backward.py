"""The quantized products of attention's backward pass against the oracle, in fp32."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mqo.megatron.attention import chunks
from mqo.megatron.attention.backward import BackwardOperands
from mqo.megatron.attention.choice import FusedAttentionError, without_scores
from mqo.quant.backend import ENVIRONMENT_VARIABLE, fake_quantize
from mqo.quant.config import current
from mqo.quant.formats import ATTENTION_BACKWARD, FORMATS, SITES
from mqo.quant.gemms import gemm_operands
from mqo.quant.micro_batches import resume
from mqo.quant.progress import set_step
from mqo.quant.record import RECORDER
from mqo.quant.stochastic import derive_seed

from ....oracles import attention_backward as oracle
from .conftest import Layer, Tracker

LENGTH = 300
SHAPES = {"plain": {}, "grouped": {"groups": 2}, "MLA's heads": {"width": 24, "groups": 2}}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of queries, and of matrices."""
    monkeypatch.setitem(chunks.BUDGET, "cpu", 2 * 32 * LENGTH)


def layer_of(query, key):
    layer = Layer()
    layer.num_attention_heads_per_partition = query.size(2)
    layer.num_query_groups_per_partition = key.size(2)
    return layer


def operands_of(types, layer):
    sites = {site: gemm_operands(site, types.get(site, "none"), layer) for site in SITES}
    return BackwardOperands(*(sites[site] for site in ATTENTION_BACKWARD))


def context_of(types, query, key, value, packed=None, mask=None, layer=None):
    """Attention with these types in its source."""
    layer = layer or layer_of(query, key)
    types = {"qk": "none", "pv": "none"} | types
    backward = operands_of(types, layer)
    attend = without_scores(layer, types, query, key, mask, packed, backward)
    return attend(gemm_operands("qk", types["qk"], layer), query, key, value, Tracker())


def grad_of(context):
    return torch.randn(context.shape, generator=torch.Generator().manual_seed(1)).to(context.dtype)


def gradients(context, tensors):
    return torch.autograd.grad(context, tensors, grad_of(context))


def dumped(context, tensors):
    """The gradients, and the probabilities and ds of the pass that computed them."""
    RECORDER.begin_step(1, 1, (1,))
    grads = gradients(context, tensors)
    query = tensors[0]
    shape = (query.size(1), query.size(2), query.size(0), -1)
    kept = RECORDER.take_dump().items()
    return grads, {name.split("/")[0::2][0] + "." + name.split("/")[-1]: t for name, t in kept}, shape


def rounding(types, seed_of=None):
    """The rounding of operands by the slow reference, whole."""

    def rounded(site, operand, array, axis):
        kind = types.get(site, "none")
        if kind == "none":
            return array
        spec = current().operand_spec(site, operand, "unlabeled", kind).spec
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
        if array.ndim == 4 and operand in ("probs", "ds"):
            tensor = tensor.flatten(0, 1)
        seed = None if seed_of is None else seed_of(site, operand)
        return fake_quantize(tensor, spec, axis=axis, seed=seed).reshape(array.shape).numpy()

    return rounded


def assert_close(actual, expected, tolerance=1e-6):
    actual = actual.detach().double().numpy() if isinstance(actual, torch.Tensor) else actual
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def assert_as_oracle(types, tensors, seed_of=None, tolerance=1e-6):
    """Each product from its own unrounded operands: so that codes are those of equal numbers."""
    query, key, value = (t.detach().numpy() for t in tensors)
    context = context_of(types, *tensors)
    (dquery, dkey, dvalue), kept, shape = dumped(context, tensors)
    grad = grad_of(context).unflatten(2, tensors[0].shape[2:3] + (-1,)).numpy()
    rounded, scale, heads = rounding(types, seed_of), Layer().softmax_scale, key.shape[2]
    probs, ds = (kept[name].view(shape).numpy() for name in ("dv.probs", "dq.ds"))
    assert torch.equal(kept["dq.ds"], kept["dk.ds"])
    assert_close(probs, oracle.probabilities(query, key, scale, rounded), tolerance)
    assert_close(ds, oracle.of_scores(probs, grad, value, rounded), tolerance)
    assert_close(dvalue, oracle.of_value(probs, grad, heads, rounded), tolerance)
    assert_close(dquery, oracle.of_query(ds, key, scale, rounded), tolerance)
    assert_close(dkey, oracle.of_key(ds, query, scale, heads, rounded), tolerance)


@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_products_equal_the_oracle(operands, monkeypatch, shape, quant_type):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    types = dict.fromkeys(ATTENTION_BACKWARD, quant_type)
    assert_as_oracle(types, operands(LENGTH, LENGTH, **shape))
