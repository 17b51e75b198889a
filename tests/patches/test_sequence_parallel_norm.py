"""Torch's norms under sequence parallelism: a look-alike of our own."""

import types

import pytest
import torch

from .conftest import executed

NORM = "megatron/core/transformer/torch_norm.py"
SOURCE = """
import torch


class WrappedTorchNorm:
    def __new__(cls, config, hidden_size, eps=1e-5):
        assert not config.persist
        assert not config.sequence_parallel, "no"
        norm_cls = torch.nn.LayerNorm
        return norm_cls(normalized_shape=hidden_size, eps=eps)
"""


@pytest.mark.parametrize("version", ["0.10.0", "0.19.2"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_norms_weights_say_whether_their_gradients_are_to_be_summed(sequence_parallel, version):
    scope = executed("sequence_parallel_norm", NORM, SOURCE, version)
    config = types.SimpleNamespace(persist=False, sequence_parallel=sequence_parallel)
    norm = scope["WrappedTorchNorm"](config, 8, eps=0.1)
    assert isinstance(norm, torch.nn.LayerNorm)
    assert (norm.normalized_shape, norm.eps) == ((8,), 0.1)
    assert [weight.sequence_parallel for weight in norm.parameters()] == [sequence_parallel] * 2


def test_the_other_demands_stay():
    scope = executed("sequence_parallel_norm", NORM, SOURCE)
    with pytest.raises(AssertionError):
        scope["WrappedTorchNorm"](types.SimpleNamespace(persist=True), 8)
