"""Attention written out, operands for it, and a look-out for tensors of s x s."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Layer:
    """What is read of a DotProductAttention."""

    def __init__(self, backend="auto", dropout=0.0):
        self.config = SimpleNamespace(sequence_parallel=False)
        if backend:
            self.config.attention_backend = SimpleNamespace(name=backend)
        self.attn_mask_type = SimpleNamespace(name="causal")
        self.scale_mask_softmax = SimpleNamespace(
            scale=None, window_size=None, input_in_float16=False, softmax_in_fp32=True
        )
        self.softmax_offset = None
        self.softmax_scale = 0.25
        self.layer_number = 3
        self.attention_dropout = torch.nn.Dropout(dropout)


class Tracker:
    """Stands for upstream's RNG tracker: a generator state of its own."""

    def __init__(self):
        self.state = torch.Generator().manual_seed(7).get_state()
        self.forks = 0

    @contextmanager
    def fork(self):
        self.forks += 1
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(before)


def written_out(query, key, value, scale, causal=True):
    """[sq, b, np * hv] from [s, b, heads, width], by the definition, in the operands' dtype."""
    groups = query.size(2) // key.size(2)
    key, value = (t.repeat_interleave(groups, dim=2) for t in (key, value))
    scores = scale * torch.einsum("ibhd,jbhd->bhij", query, key)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value).flatten(2)


@pytest.fixture
def operands():
    """A function that makes query, key and value with gradients, reproducibly."""

    def make(sq=40, sk=40, heads=4, groups=4, width=16, value_width=16, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        shapes = ((sq, 2, heads, width), (sk, 2, groups, width), (sk, 2, groups, value_width))
        made = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
        return [t.requires_grad_() for t in made]

    return make


class Largest(TorchDispatchMode):
    """Notes the largest output of any operation, and of which."""

    def __init__(self):
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.elements:
                self.elements, self.operation = tensor.numel(), str(func)
        return made


@contextmanager
def largest():
    with Largest() as seen:
        yield seen
