"""Context parallelism in local attention: a look-alike of our own."""

import types

import pytest
from mqo.errors import DriftError

from .conftest import patched_attention

SOURCE = """
import torch


class DotProductAttention:
    num_attention_heads_per_partition, num_query_groups_per_partition = 4, 2

    def __init__(self, config):
        self.config = config
        assert self.config.context_parallel_size == 1, "not here"

    def forward(self, query, key, value, attention_mask, packed_seq_params=None):
        assert packed_seq_params is None, "not supported"
        if self.num_attention_heads_per_partition // self.num_query_groups_per_partition > 1:
            pass
        matmul_input_buffer = None
        scores = torch.baddbmm(
            matmul_input_buffer, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0
        )
        attention_probs = scores
        return torch.bmm(attention_probs, value.transpose(0, 1))
"""


def patched(source=SOURCE):
    return patched_attention(source, "quant_sites", "fused_attention", "context_parallel")


@pytest.fixture
def attention(module):
    """A function that makes the patched look-alike for some ranks; both paths say what they got."""

    def make(ranks):
        module("mqo.megatron.attention.backward", BackwardOperands=dict)
        module("mqo.quant", gemm_operands=lambda *_: _Same, site_types=lambda path: {})
        module(
            "mqo.megatron.attention.choice",
            without_scores=lambda layer, *_: lambda qk, *tensors: tensors[:3],
        )
        module(
            "mqo.megatron.attention.context",
            gather_context=lambda tensor, group: (group, tensor),
            chunk_mask=lambda *args: ("mask", *args),
        )
        group = types.SimpleNamespace(rank=lambda: 1, size=lambda: ranks)
        scope = {
            "__file__": "a path",
            "tensor_parallel": types.SimpleNamespace(get_cuda_rng_tracker=lambda: None),
            "parallel_state": types.SimpleNamespace(get_context_parallel_group=lambda: group),
        }
        exec(patched(), scope)
        return scope["DotProductAttention"](types.SimpleNamespace(context_parallel_size=ranks))

    return make


class _Same:
    lhs = rhs = staticmethod(lambda tensor: tensor)


def test_keys_and_values_are_gathered_before_the_fused_branch(attention):
    layer = attention(2)
    query, (group, key), (_, value) = layer.forward("query", "key", "value", None)
    assert (query, key, value) == ("query", "key", "value")
    assert group.size() == 2
    assert layer.mqo_part == (1, 2)


def test_without_context_parallelism_nothing_is_touched(attention):
    layer = attention(1)
    assert layer.forward("query", "key", "value", None) == ("query", "key", "value")
    assert not hasattr(layer, "mqo_part")


def test_the_mask_is_made_behind_the_fused_branch_and_only_where_none_is_given():
    lines = [line.strip() for line in patched().splitlines()]
    order = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in (
            "key, value = gather_context",
            "qk_operands = gemm_operands",
            "attend = without_scores",
            "if self.config.context_parallel_size > 1 and attention_mask is None:",
            "if self.num_attention_heads_per_partition",
        )
    ]
    assert order == sorted(order)


def test_a_source_that_does_not_refuse_it_is_not_this_one():
    with pytest.raises(DriftError, match="context_parallel_size == 1"):
        patched(SOURCE.replace("context_parallel_size == 1", "context_parallel_size < 2"))
