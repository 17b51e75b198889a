"""Packed activations: what backward gets, in how many bytes, and when."""

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.gemms import gemm_operands
from mqo.quant.packed_activations import saved_operands
from mqo.quant.spec import QuantSpec


class Linear(torch.autograd.Function):
    """A linear layer that saves its input as the patched one does."""

    @staticmethod
    def forward(ctx, x, weight, kind):
        ctx.save_for_backward(x, weight)
        q = gemm_operands("fprop", kind, weight)
        q.save(ctx, x, weight, x)
        return q.lhs(x) @ q.rhs(weight).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = saved_operands(ctx)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


def gradients(x, weight, kind="mxfp8"):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = Linear.apply(x, weight, kind)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad, weight.grad


def saved_bytes(x, weight, kind="mxfp8"):
    """Bytes of the tensors in the graph, the weight apart."""
    node = Linear.apply(x.requires_grad_(), weight, kind).grad_fn
    return sum(t.nbytes for t in node.saved_tensors if t is not weight)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*s, generator=generator).bfloat16() for s in ((5, 3, 64), (8, 64)))


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "hifp8"])
def test_backward_sees_what_fprop_multiplied(options, tensors, kind):
    x, weight = tensors
    plain = gradients(x, weight, kind)
    options('[quantizer]\nsave_activations = "packed"\n')
    y, dx, dw = gradients(x, weight, kind)
    assert y.equal(plain[0])
    assert dx.equal(plain[1])
    assert not dw.equal(plain[2])
    rounded = fake_quantize(x, QuantSpec(kind))
    assert dw.equal(torch.ones(8, 15).bfloat16() @ rounded.flatten(0, -2))


@pytest.mark.parametrize(("kind", "bits"), [("mxfp8", 8.25), ("mxfp4", 4.25), ("hifp8", 8)])
def test_the_codes_take_their_bits_an_element(options, tensors, kind, bits):
    x, weight = tensors
    assert saved_bytes(x, weight, kind) == x.nbytes
    options('[quantizer]\nsave_activations = "packed"\n')
    assert saved_bytes(x, weight, kind) == x.numel() * bits / 8


def test_an_unquantized_layer_saves_its_input(options, tensors):
    options('[quantizer]\nsave_activations = "packed"\n[layers]\nexclude = ["*"]\n')
    x, weight = tensors
    assert saved_bytes(x, weight, "none") == x.nbytes
    assert saved_bytes(x, weight, "mxfp8") == x.nbytes


def test_stochastic_rounding_draws_for_backward_as_for_fprop(options, tensors):
    options('[quantizer]\nsave_activations = "packed"\nrounding = "stochastic"\n')
    x, _ = tensors
    eye = torch.eye(64).bfloat16()
    y, _, dw = gradients(x, eye)
    assert dw.equal(torch.ones(64, 15).bfloat16() @ y.flatten(0, -2))


def test_an_unknown_form_is_refused(options, tensors):
    options('[quantizer]\nsave_activations = "zip"\n')
    with pytest.raises(ValueError, match=r"save_activations.*'zip'; valid: full, packed"):
        gradients(*tensors)
