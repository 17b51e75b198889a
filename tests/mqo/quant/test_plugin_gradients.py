"""The estimator of a quantizer: the gradient that it gives, where it is called, and its errors."""

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.config import parse
from mqo.quant.model import quantize_model
from mqo.quant.plugin_context import QuantizerError
from mqo.quant.plugin_decorators import estimator, quantizer
from mqo.quant.recipe import Recipe
from torch import nn

BOUND = 1.5  # in units of the RMS of a row: some elements are above it


def rms(x):
    return x.square().mean(1, keepdim=True).sqrt()


def clipped(block=None, estimate=None):
    """A quantizer that clips, whose gradient is 0 where it does."""

    @quantizer("clipped", block=block, estimator=True)
    def quantize(x, context):
        scale = BOUND * rms(x)
        return ((x / scale).clamp(-1, 1) * 7).round() / 7 * scale

    def masked(grad, x, context):
        return grad * (x.abs() <= BOUND * rms(x))

    estimator("clipped")(estimate or masked)


def recipe(**operands):
    types = {"fprop": "clipped", "dgrad": "none", "wgrad": "none"}
    return Recipe(name="own", summary="", source="", types=types, operands=operands)


class Reference(torch.autograd.Function):
    """A linear layer with the same quantizer and mask, written out."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return fake_quantize(x, "clipped") @ fake_quantize(weight, "clipped").t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        mask_x, mask_weight = (t.abs() <= BOUND * rms(t) for t in (x, weight))
        return (grad @ weight) * mask_x, (grad.t() @ x) * mask_weight


@pytest.mark.parametrize("trains", ["both", "input", "weight"])
def test_a_layer_has_the_gradients_of_the_estimator(trains):
    clipped()
    torch.manual_seed(0)
    x = torch.randn(6, 40, requires_grad=trains != "weight")
    layer = nn.Sequential(nn.Linear(40, 24, bias=False))
    layer[0].weight.requires_grad_(trains != "input")
    weight = layer[0].weight.detach().clone().requires_grad_(trains != "input")
    other = x.detach().clone().requires_grad_(trains != "weight")
    Reference.apply(other, weight).square().sum().backward()
    quantize_model(layer, recipe())
    layer(x).square().sum().backward()
    for own, reference in ((x, other), (layer[0].weight, weight)):
        assert (own.grad is None) == (reference.grad is None)
        if own.grad is not None:
            assert torch.equal(own.grad, reference.grad)
            assert (own.grad == 0).any() and (own.grad != 0).any()


def test_it_gets_both_tensors_as_the_quantizer_gets_its_own():
    calls = []

    def estimate(grad, x, context):
        calls.append((context.operand, tuple(grad.shape), tuple(x.shape), x.dtype))
        assert context.site == "fprop"
        return grad

    clipped(block=16, estimate=estimate)
    layer = nn.Sequential(nn.Linear(40, 24)).bfloat16()
    quantize_model(layer, recipe())
    x = torch.randn(2, 3, 40, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    # 40 columns are padded to blocks of 16; leading dimensions become rows.
    assert calls == [
        ("x", (6, 48), (6, 48), torch.float32),
        ("weight", (24, 48), (24, 48), torch.float32),
    ]
    assert x.grad.shape == x.shape and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "estimate",
    [lambda grad, x, context: grad[:1], lambda grad, x, context: None],
    ids=["another shape", "no tensor"],
)
def test_an_error_names_the_operand(estimate):
    clipped(estimate=estimate)
    layer = nn.Sequential(nn.Linear(40, 24))
    quantize_model(layer, recipe())
    with pytest.raises(QuantizerError, match=r"estimator of clipped.*x of fprop, layer 0"):
        layer(torch.randn(2, 40, requires_grad=True)).sum().backward()


def test_it_must_exist_and_be_declared():
    @quantizer("declares_one", estimator=True)
    def quantize(x, context):
        return x

    @quantizer("declares_none")
    def another(x, context):
        return x

    with pytest.raises(QuantizerError, match="@estimator"):
        fake_quantize(torch.ones(2, 2), "declares_one")
    for name in ("declares_none", "unknown"):
        with pytest.raises(ValueError, match=name):
            estimator(name)(quantize)


@pytest.mark.parametrize("read", [lambda c: c.amax, lambda c: c.rand()])
def test_an_estimator_has_neither_amax_nor_random_numbers(read):
    @quantizer("clipped", needs_amax=True, stochastic=True, estimator=True)
    def quantize(x, context):
        return x + 0

    estimator("clipped")(lambda grad, x, context: grad * read(context))
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_model(model, recipe())
    with pytest.raises(QuantizerError, match="as an estimator"):
        model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize(
    "text",
    [
        "[asked]\nqk = 'clipped'",
        "[asked]\npv = 'clipped'",
        "[asked]\ndgrad = 'clipped'",
        "[asked]\nfprop = 'none'\nwgrad = 'clipped'",
        "[asked]\nfprop = 'clipped'\n[operands]\n'fprop.weight' = { gain = 0.75 }",
    ],
)
def test_options_under_which_it_would_not_compute_gradients_are_refused(text):
    clipped()
    with pytest.raises(ValueError, match="estimator"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "[asked]\nfprop = 'clipped'\ndgrad = 'clipped'\nwgrad = 'clipped'",
        "[asked]\nfprop = 'mxfp8'\n[operands]\n'fprop.weight' = { quant_type = 'clipped' }",
        "[asked]\nfprop = 'mxfp8'\n[[rules]]\nlayers = 'fprop:*.fc1'\nquant_type = 'clipped'",
        "[asked]\nfprop = 'mxfp8'\n[schedule]\nfprop = 'mxfp8 until 5, then clipped'",
    ],
)
def test_other_options_are_not(text):
    clipped()
    assert parse(text).own_types() == {"clipped"}


def test_a_transform_that_does_not_fit_is_refused_in_the_forward_pass():
    clipped()
    turned = {"hadamard": 16, "signs": "none"}
    own = recipe(**{"fprop.x": turned, "fprop.weight": turned})
    model = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 32))
    quantize_model(model, own)
    with pytest.raises(QuantizerError, match=r"layer 0 has 40 .* multiple of 16, because"):
        model(torch.randn(6, 40))
    assert model[1](torch.randn(6, 32)).shape == (6, 32)
