"""Stochastic rounding over micro-batches: who draws what, and that its noise averages."""

from contextlib import nullcontext

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.gemms import gemm_operands
from mqo.quant.packed_activations import saved_operands
from mqo.quant.progress import set_step
from mqo.quant.quantization import PROCESS
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import derive_seed
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

KIND = "mxfp4"
SPEC = QuantSpec(KIND, rounding="stochastic")


class Linear(torch.autograd.Function):
    """A linear layer that calls its three sites as the patched one does, and notes operands."""

    @staticmethod
    def forward(ctx, x, weight, seen):
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        q = gemm_operands("fprop", KIND, weight)
        q.save(ctx, x, weight, x)
        seen.append(("fprop", q.lhs(x)))
        return seen[-1][1] @ q.rhs(weight).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = saved_operands(ctx)
        seen, q = ctx.seen, gemm_operands("dgrad", KIND, weight)
        seen.append(("dgrad", q.lhs(grad)))
        dx = seen[-1][1] @ q.rhs(weight)
        q = gemm_operands("wgrad", KIND, weight)
        seen.append(("wgrad", q.lhs(grad)))
        return dx, seen[-1][1].t() @ q.rhs(x), None


@pytest.fixture(autouse=True)
def everything_is_random(options):
    options('[quantizer]\nrounding = "stochastic"\n')
    PROCESS.micro_batches.set_replica(0, 1)
    yield
    PROCESS.micro_batches.set_replica(0, 1)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 64, generator=generator), Parameter(
        torch.randn(32, 64, generator=generator)
    )


def run(x, weight, seen, recompute=False):
    x = x.clone().requires_grad_()
    if recompute:
        return checkpoint(Linear.apply, x, weight, seen, use_reentrant=True)
    return Linear.apply(x, weight, seen)


def seed_of(site, operand, micro_batch, shard=0):
    place = {"site": site, "operand": operand, "layer": "unlabeled"}
    return derive_seed(0, step=0, micro_batch=micro_batch, shard=shard, **place)


def test_every_micro_batch_draws_its_own(tensors):
    x, weight = tensors
    for micro_batch in range(3):
        seen = []
        run(x, weight, seen)
        expected = fake_quantize(x, SPEC, seed=seed_of("fprop", "x", micro_batch))
        assert seen[0][1].equal(expected)


def test_backward_draws_for_the_micro_batch_of_its_forward(tensors):
    """A pipeline runs several forward passes before the first backward pass."""
    x, weight = tensors
    seen, outputs = [], []
    outputs = [run(x, weight, seen) for _ in range(3)]
    ones = torch.ones_like(outputs[0])
    for micro_batch in (2, 0, 1):
        seen.clear()
        outputs[micro_batch].backward(ones)
        for site, operand in seen:
            axis = -1 if site == "dgrad" else 0
            seed = seed_of(site, "grad", micro_batch)
            assert operand.equal(fake_quantize(ones, SPEC, axis=axis, seed=seed))


def test_a_recomputed_pass_repeats_the_draws_of_the_first(tensors):
    x, weight = tensors
    seen, outputs = [], []
    outputs = [run(x, weight, seen, recompute=True) for _ in range(2)]
    first = [operand for _, operand in seen]
    for micro_batch, output in enumerate(outputs):
        seen.clear()
        output.sum().backward()
        again = dict(seen)
        assert again["fprop"].equal(first[micro_batch])
        seed = seed_of("dgrad", "grad", micro_batch)
        assert again["dgrad"].equal(fake_quantize(torch.ones(16, 32), SPEC, seed=seed))
    assert not first[0].equal(first[1])


def test_data_parallel_ranks_are_further_micro_batches(tensors):
    x, weight = tensors
    alone, shared = [], {}
    for _ in range(4):
        run(x, weight, alone)
    for rank in (0, 1):
        PROCESS.micro_batches.set_replica(rank, 2)
        set_step(0)
        seen = []
        for micro_batch in range(2):
            run(x, weight, seen)
            shared[2 * micro_batch + rank] = seen[-1][1]
    assert all(shared[i].equal(alone[i][1]) for i in range(4))


@pytest.mark.parametrize("begins_step", [True, False], ids=["first_of_step", "mid_step"])
def test_an_extra_pass_draws_as_the_passes_after_it(tensors, begins_step):
    x, weight = tensors
    seen = []
    run(x, weight, seen)
    if begins_step:
        set_step(0)
    first = 0 if begins_step else 1
    for passes in (PROCESS.extra_pass(), nullcontext()):
        seen.clear()
        with passes:
            for _ in range(2):
                run(x, weight, seen)
        for micro_batch, (_, operand) in enumerate(seen, first):
            seed = seed_of("fprop", "x", micro_batch)
            assert operand.equal(fake_quantize(x, SPEC, seed=seed))


# -- statistics ------------------------------------------------------------------------------------


def weight_gradients(tensors, micro_batches):
    """The gradient of each micro-batch, all of the same data: they differ by their draws alone."""
    x, weight = tensors
    found = []
    for _ in range(micro_batches):
        weight.grad = None
        run(x, weight, []).backward(torch.linspace(-1, 1, 16 * 32).view(16, 32))
        found.append(weight.grad.double())
    return torch.stack(found)


def exact_gradient(tensors):
    x, _ = tensors
    return torch.linspace(-1, 1, 16 * 32).view(16, 32).t().double() @ x.double()


def test_the_mean_over_micro_batches_is_unbiased(options, tensors):
    options('[quantizer]\nrounding = "stochastic"\nscale_rule = "ceil"\n')
    count = 400
    found = weight_gradients(tensors, count)
    error = found.mean(0) - exact_gradient(tensors)
    sigma = found.std(0) / count**0.5
    # 2048 elements: one beyond 4 sigma is a chance of an eighth, and the seed is fixed.
    assert ((error.abs() > 4 * sigma).double().mean() < 2e-3) and sigma.min() > 0
    assert (error / sigma).mean().abs() < 4 / error.numel() ** 0.5
