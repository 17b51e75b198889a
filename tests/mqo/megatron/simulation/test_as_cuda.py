"""What stands for CUDA's kernels, against torch's own on a CPU."""

import sys

import pytest
import torch
from mqo.megatron.simulation.as_cuda import _compiled, _rms_norm, adam
from mqo.megatron.simulation.watch import Watch
from torch.nn.functional import rms_norm

from .... import forking

# In a process of its own, since it changes torch and what Megatron binds once.
IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
from mqo.megatron.simulation.as_cuda import import_megatron
from mqo.megatron.simulation.watch import Watch
import_megatron(Watch())
import torch
from megatron.core.jit import jit_fuser
assert jit_fuser is torch.compile, jit_fuser
"""


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_norm_is_torchs(dtype, near):
    torch.manual_seed(0)
    inputs = [torch.randn(3, 5, 16, dtype=dtype), torch.randn(16, dtype=dtype)]
    grad = torch.randn(3, 5, 16, dtype=dtype)
    results = []
    for norm in (rms_norm, lambda *args: _rms_norm(Watch(), *args)):
        x, weight = (t.clone().requires_grad_() for t in inputs)
        made = norm(x, [16], weight, 1e-5)
        made.backward(grad)
        results.append((made.detach(), x.grad, weight.grad))
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() <= near * theirs.norm()


def test_the_norm_keeps_its_input_and_a_number_a_row():
    kept = []
    x, weight = torch.randn(3, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _rms_norm(Watch(), x, [16], weight, 1e-5)
    assert [tuple(t.shape) for t in kept] == [(3, 16), (16,), (3, 1)]
    assert kept[2].dtype == torch.float32


def test_what_is_compiled_counts_as_one_operation():
    seen = []
    watch = Watch(lambda call: seen.append(call.func))

    @_compiled(watch)
    def scaled(x, *, by):
        return (x * by).exp() + 1

    with watch:
        x = torch.ones(4)
        made = scaled(x, by=3)
    assert torch.equal(made, (torch.ones(4) * 3).exp() + 1)
    assert seen.count(None) == 1
    assert len(seen) == 2  # and torch.ones


def test_what_megatron_has_compiled_on_gpus_is_compiled(vendored):
    done = forking.run([sys.executable, "-c", IMPORT, vendored.root])
    assert done.returncode == 0, done.stdout + done.stderr


def test_adam_updates_a_group_at_once():
    optimizer = type("Wrapped", (), {})()
    optimizer.optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)])
    adam(optimizer)
    assert optimizer.optimizer.param_groups[0]["foreach"] is True
