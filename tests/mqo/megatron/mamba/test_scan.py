"""The chunked scan against the recurrence that it computes, token by token in fp64."""

import pytest
import torch
from mqo.megatron.mamba.scan import chunk_scan

BATCH, HEADS, WIDTH, STATE = 2, 4, 8, 16
# fp32 sums of some hundred terms; measured: outputs 1.4e-7, gradients 6e-7.
EXACT = 5e-6


def recurrence(x, dt, a, b, c):
    """The outputs of the scan, from its definition."""
    per_group = x.size(2) // b.size(2)
    b, c = (t.repeat_interleave(per_group, dim=2) for t in (b, c))
    state, outputs = x.new_zeros(len(x), x.size(2), b.size(-1), x.size(-1)), []
    for t in range(x.size(1)):
        decay = torch.exp(dt[:, t] * a)
        new = (dt[:, t, :, None] * b[:, t]).unsqueeze(-1) * x[:, t].unsqueeze(-2)
        state = decay[:, :, None, None] * state + new
        outputs.append((c[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, 1)


def operands(tokens, groups=2, longest_step=0.1):
    """x, dt, a, b and c in fp64, drawn as Mamba-2 initializes them."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(function, *shape):
        return function(*shape, generator=generator, dtype=torch.float64)

    x = draw(torch.randn, BATCH, tokens, HEADS, WIDTH)
    dt = longest_step * draw(torch.rand, BATCH, tokens, HEADS)
    a = -1 - 15 * draw(torch.rand, HEADS)
    b, c = (draw(torch.randn, BATCH, tokens, groups, STATE) for _ in range(2))
    return x, dt, a, b, c


def deviation(ours, right):
    """The relative deviation, by norms."""
    return ((ours.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("tokens", "chunk"), [(1, 8), (7, 8), (64, 16), (65, 16), (200, 128), (96, 96)]
)
def test_outputs_and_gradients_are_those_of_the_recurrence(tokens, chunk, groups):
    exact = [tensor.requires_grad_() for tensor in operands(tokens, groups)]
    ours = [tensor.detach().float().requires_grad_() for tensor in exact]
    right, y = recurrence(*exact), chunk_scan(*ours, chunk)
    assert y.shape == right.shape and y.dtype == torch.float32
    assert deviation(y, right) < EXACT
    weights = torch.linspace(-1, 1, right.numel(), dtype=torch.float64).view_as(right)
    grads = torch.autograd.grad((right * weights).sum(), exact)
    own = torch.autograd.grad((y * weights.float()).sum(), ours)
    for name, mine, right in zip(["x", "dt", "a", "b", "c"], own, grads, strict=True):
        if right.norm() > 0:  # one token: nothing decays
            assert deviation(mine, right) < EXACT, name


def test_a_strong_decay_loses_no_digits_and_overflows_nowhere():
    """Sums of log decays reach -8000 in a chunk here; differences of them would lose 3 digits."""
    exact = operands(256, longest_step=4.0)
    ours = [tensor.float().requires_grad_() for tensor in exact]
    y = chunk_scan(*ours, 256)
    assert deviation(y, recurrence(*exact)) < EXACT
    y.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in ours)


def test_bf16_operands_are_computed_in_fp32():
    rounded = [tensor.bfloat16() for tensor in operands(40)]
    y = chunk_scan(*rounded, 16)
    assert y.dtype == torch.float32
    assert deviation(y, recurrence(*(tensor.double() for tensor in rounded))) < EXACT
