"""The noise of weight gradients, against the whole products of the same operands."""

import math

import pytest
import torch
from mqo.quant.config import current
from mqo.quant.gemms import gemm_operands
from mqo.quant.gradient_noise import ROWS, WatchedOperand, sample_gradient
from mqo.quant.measurement import merge
from mqo.quant.record import RECORDER

from .tensors import normal

TOKENS, OUT, IN = 64, 40, 24


def ratio(exact, rounded):
    return (exact.double().norm() / (rounded.double() - exact.double()).norm()).item()


def multiplied(micro_batches, quant_type, site="wgrad", layer=None):
    """The sums of the exact and of the rounded products of a step's micro-batches."""
    exact, rounded = 0, 0
    for n in range(micro_batches):
        grad, x = normal(TOKENS, OUT, seed=2 * n), normal(TOKENS, IN, seed=2 * n + 1)
        operands = gemm_operands(site, quant_type, layer)
        multiply = operands.product(torch.matmul)
        exact = exact + grad.t() @ x
        rounded = rounded + multiply(operands.lhs(grad).t(), operands.rhs(x))
    return exact, rounded


@pytest.mark.parametrize("quant_type", ["mxfp4", "mxfp8", "nvfp4", "fp8_tensor_e4m3"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_ratio_is_that_of_some_rows_of_the_steps_gradient(quant_type, micro_batches):
    RECORDER.begin_step(1, 1, (), gradients=True)
    exact, rounded = multiplied(micro_batches, quant_type)
    (record,) = RECORDER.take_gradients()
    rows = slice(None, None, math.ceil(OUT / ROWS))
    assert record.key == ("wgrad", "unlabeled", "gradient", quant_type)
    assert record.noise_ratio == pytest.approx(ratio(exact[rows], rounded[rows]), rel=1e-4)
    assert RECORDER.take_gradients() == []


def test_a_transform_of_both_operands_is_no_noise(options):
    options('[operands]\n"wgrad.grad" = { hadamard = 32 }\n"wgrad.x" = { hadamard = 32 }\n')
    assert current().operand_spec("wgrad", "x", "unlabeled", "mxfp8").hadamard
    RECORDER.begin_step(1, 1, (), gradients=True)
    multiplied(1, "mxfp8")
    (record,) = RECORDER.take_gradients()
    assert 20 < record.noise_ratio < 100


def test_all_rows_of_a_small_gradient_are_measured():
    grad, x = normal(TOKENS, ROWS, seed=0), normal(TOKENS, IN, seed=1)
    sample = sample_gradient(WatchedOperand(grad, grad), WatchedOperand(x, x.bfloat16()))
    torch.testing.assert_close(sample.gradient, grad.t() @ x)
    noise = grad.t() @ (x.bfloat16().float() - x)
    # The noise is the difference of two products of some 10, each exact to 2^-24 of its terms.
    torch.testing.assert_close(sample.noise, noise, atol=1e-4, rtol=0)
    assert sample.noise.abs().max() > 0.01


@pytest.mark.parametrize(
    ("iteration", "gradients", "site"),
    [(2, True, "wgrad"), (1, False, "wgrad"), (1, True, "dgrad")],
)
def test_nothing_else_is_measured(iteration, gradients, site):
    RECORDER.begin_step(iteration, 5, (), gradients)
    grad, x = normal(TOKENS, IN, seed=0), normal(IN, IN, seed=1)
    operands = gemm_operands(site, "mxfp4", None)
    operands.lhs(grad), operands.rhs(x if site == "dgrad" else grad)
    assert RECORDER.take_gradients() == []


def test_a_gradient_of_zeros_has_no_ratio():
    RECORDER.begin_step(1, 1, (), gradients=True)
    operands = gemm_operands("wgrad", "mxfp4", None)
    operands.lhs(torch.zeros(TOKENS, OUT)), operands.rhs(normal(TOKENS, IN, seed=0))
    (record,) = RECORDER.take_gradients()
    assert record.noise_ratio is None


def test_energies_of_ranks_add():
    ranks = []
    for _ in range(2):
        RECORDER.begin_step(1, 1, (), gradients=True)
        multiplied(1, "mxfp4")
        ranks.append(RECORDER.take_gradients())
    (record,), (alone,) = merge(ranks), ranks[0]
    assert record.signal == 2 * alone.signal and record.noise_ratio == alone.noise_ratio
