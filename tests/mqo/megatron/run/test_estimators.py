"""Estimators in Megatron's linear layers, of which stand-ins have the names and the signatures."""

import pytest
import torch
from mqo.megatron import linear
from mqo.megatron.layers import find_layers
from mqo.megatron.run.estimators import attach
from mqo.quant.plugin_decorators import estimator, quantizer
from torch import nn
from torch.nn.functional import linear as multiply
from torch.utils.checkpoint import checkpoint

FACTORS = {"x": 2.0, "weight": 3.0}
PLUGIN = "[plugins]\nown = { declared = { estimator = true } }\n"


@pytest.fixture(autouse=True)
def own_types(monkeypatch):
    monkeypatch.setattr(linear, "source_types", lambda: {"fprop": "own"})


@pytest.fixture
def start(run):
    """Start a run with a quantizer that keeps values, and multiplies gradients by FACTORS."""

    def begin(exclude=(), **asked):
        run(exclude=exclude, rest=PLUGIN, **(asked or {"fprop": "own"}))

        @quantizer("own", estimator=True)
        def quantize(x, context):
            return x

        @estimator("own")
        def scaled(grad, x, context):
            return grad * FACTORS[context.operand]

    return begin


class ColumnParallelLinear(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        weight = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.register_parameter("weight", None if tied else weight)
        self.gradient_accumulation_fusion = False

    def forward(self, input_, weight=None):
        return multiply(input_, self.weight if weight is None else weight)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = ColumnParallelLinear()
        self.linear_proj = ColumnParallelLinear()


def gradients(model, x, recomputes=False):
    x = x.clone().requires_grad_()
    out = checkpoint(model.fc1, x, use_reentrant=False) if recomputes else model.fc1(x)
    out.sum().backward()
    return x.grad, model.fc1.weight.grad


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_of_input_and_weight_are_those_of_the_estimator(start, recomputes):
    x, plain, model = torch.ones(2, 4), Model(), Model()
    of_x, of_weight = gradients(plain, x)
    start()
    assert attach(find_layers(model)) == []
    own_x, own_weight = gradients(model, x, recomputes)
    assert torch.equal(own_x, 2 * of_x) and torch.equal(own_weight, 3 * of_weight)


def test_gradients_of_micro_batches_add_up(start):
    start()
    model = Model()
    attach(find_layers(model))
    for _ in range(2):
        _, of_weight = gradients(model, torch.ones(2, 4))
    assert torch.equal(of_weight, torch.full((3, 4), 2 * 3 * 2.0))


def test_a_tied_weight_is_an_argument_of_the_layer(start):
    start()
    model = nn.Module()
    model.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(3, 4)})
    model.output_layer = ColumnParallelLinear(tied=True)
    model.share_embeddings_and_output_weights = True
    found_layers = find_layers(model)
    assert [row.layer.name for row in found_layers] == ["output_layer"]
    assert attach(found_layers) == []
    x = torch.ones(2, 4, requires_grad=True)
    weight = model.embedding["word_embeddings"].weight
    model.output_layer(x, weight=weight).sum().backward()
    assert torch.equal(x.grad, 2 * weight.detach().sum(0).expand(2, 4))
    assert torch.equal(weight.grad, torch.full((3, 4), 3 * 2.0))


def test_a_weight_that_is_also_an_argument_is_estimated_once(start):
    """The last stage of a pipeline passes its own copy of a tied weight."""
    start()
    model = Model()
    attach(find_layers(model))
    x = torch.ones(2, 4)
    model.fc1(x, weight=model.fc1.weight).sum().backward()
    assert torch.equal(model.fc1.weight.grad, torch.full((3, 4), 3 * 2.0))


def test_an_excluded_layer_and_another_type_keep_their_gradients(start):
    start(exclude=["*fc1"])
    excluded = Model()
    assert attach(find_layers(excluded)) == []
    start(fprop="mxfp8")
    other = Model()
    assert attach(find_layers(other)) == []
    for model in (excluded, other):
        assert not model.fc1._forward_pre_hooks and not model.fc1.weight._backward_hooks


def test_a_layer_that_adds_gradients_in_its_kernel_is_refused(start):
    start()
    model = Model()
    model.fc1.gradient_accumulation_fusion = True
    (fault,) = attach(find_layers(model))
    assert fault.startswith("fc1 ") and "--no-gradient-accumulation-fusion" in fault


def test_an_evaluation_has_no_gradients_to_change(start):
    start()
    model = Model()
    attach(find_layers(model))
    with torch.no_grad():
        assert not model.fc1(torch.ones(2, 4)).requires_grad
