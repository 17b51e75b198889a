"""The rotated part of latent attention's keys under tensor parallelism: a look-alike of our own."""

import sys
import types

import pytest
import torch

from .conftest import executed

PATH = "megatron/core/transformer/multi_latent_attention.py"
SOURCE = """
class MLASelfAttention:
    def get_query_key_value_tensors(self, kv_combined):
        return gather_from_tensor_model_parallel_region(kv_combined)
"""


class _TwoRanks(torch.autograd.Function):
    """Identity, whose gradient another rank with the same one adds its own to."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("version", ["0.11.0", "0.19.2"])
def test_the_gradient_of_the_shared_part_alone_is_added_up(monkeypatch, version):
    stand_in = types.ModuleType("megatron.core.tensor_parallel")
    stand_in.copy_to_tensor_model_parallel_region = _TwoRanks.apply
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    names = {"gather_from_tensor_model_parallel_region": lambda x: x}
    scope = executed("mla_tensor_parallel", PATH, SOURCE, version, **names)
    attention = scope["MLASelfAttention"]()
    attention.config = type("Config", (), {"kv_lora_rank": 3})
    projected = torch.rand(2, 1, 5, requires_grad=True)
    made = attention.get_query_key_value_tensors(projected)
    assert made.equal(projected)
    made.sum().backward()
    assert projected.grad[0, 0].tolist() == [1, 1, 1, 2, 2]
