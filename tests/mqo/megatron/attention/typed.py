"""Attention with types in its source: its context, its gradients, and what they rounded."""

import numpy as np
import torch
from mqo.megatron.attention.backward import BackwardOperands
from mqo.megatron.attention.choice import without_scores
from mqo.quant.formats import ATTENTION, ATTENTION_BACKWARD, SITES
from mqo.quant.gemms import gemm_operands
from mqo.quant.record import RECORDER

from .conftest import Layer, Tracker


def rows(keys):
    """[operands] with the same keys for all of attention."""
    sites = [site for site in SITES.values() if site.layer == ATTENTION]
    names = (f"{site.name}.{operand}" for site in sites for operand in (site.lhs, site.rhs))
    return "[operands]\n" + "".join(f'"{name}" = {{ {keys} }}\n' for name in names)


def layer_of(query, key):
    layer = Layer()
    layer.num_attention_heads_per_partition = query.size(2)
    layer.num_query_groups_per_partition = key.size(2)
    return layer


def context_of(types, query, key, value, packed=None, mask=None, layer=None):
    """Attention with these types in its source."""
    layer = layer or layer_of(query, key)
    types = {"qk": "none", "pv": "none"} | types
    qk = gemm_operands("qk", types["qk"], layer)
    sites = {s: gemm_operands(s, types.get(s, "none"), layer) for s in ATTENTION_BACKWARD}
    attend = without_scores(layer, types, query, key, mask, packed, BackwardOperands(**sites))
    return attend(qk, query, key, value, Tracker())


def grad_of(context):
    return torch.randn(context.shape, generator=torch.Generator().manual_seed(1)).to(context.dtype)


def gradients(context, tensors):
    return torch.autograd.grad(context, tensors, grad_of(context))


def dumped(compute):
    """Return what `compute` returns, and {site.operand: what was rounded}."""
    RECORDER.begin_step(1, 1, (1,))
    result = compute()
    kept = RECORDER.take_dump()
    return result, {f"{n.split('/')[0]}.{n.split('/')[-1]}": t for n, t in kept.items()}


def assert_close(actual, expected, tolerance=1e-6):
    actual = actual.detach().double().numpy() if isinstance(actual, torch.Tensor) else actual
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()
