"""The changes of loss and gradient when one subset is quantized, on a model of three layers."""

from argparse import Namespace
from contextlib import nullcontext

import pytest

pytest.importorskip("torch")
import torch
from megatron.inference import sensitivity
from mqo.megatron.layers import FoundLayer
from mqo.megatron.run.errors import SavedError
from mqo.quant.config import using
from mqo.quant.formats import LINEAR
from mqo.quant.gemms import gemm_operands
from mqo.quant.labels import LABEL, Layer
from mqo.quant.operand_table import OperandRow
from mqo.quant.quant_config import QuantConfig
from mqo.quant.subsets import unquantized

VOCABULARY, WIDTH, LAYERS = 16, 64, 3
IDLE = slice(None, None, 32)  # inputs that no layer reads: one in each block of a weight
BATCHES = [[[*range(9)], [*range(5, 14)]], [[3, 1, 4, 1, 5]]]
TOKENS = 8 + 8 + 4
TYPES = {"fprop": "mxfp4", "dgrad": "mxfp4", "wgrad": "mxfp4"}


class Product(torch.autograd.Function):
    """A linear layer with the three sites, as Megatron's has them."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        fprop = gemm_operands("fprop", TYPES["fprop"], weight)
        return fprop.product(torch.matmul)(fprop.lhs(x), fprop.rhs(weight).t())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dgrad = gemm_operands("dgrad", TYPES["dgrad"], weight)
        wgrad = gemm_operands("wgrad", TYPES["wgrad"], weight)
        grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        dx = dgrad.product(torch.matmul)(dgrad.lhs(grad), dgrad.rhs(weight))
        dweight = wgrad.product(torch.matmul)(wgrad.lhs(grad).t(), wgrad.rhs(x))
        return dx.view(*ctx.saved_tensors[0].shape), dweight


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.read = torch.ones(WIDTH)
        self.read[IDLE] = 0
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=draw))
        self.weights = torch.nn.ParameterList(
            torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(LAYERS)
        )

    def forward(self, tokens, positions, mask, *, labels):
        x = self.embedding[tokens]
        for weight in self.weights:
            x = Product.apply(torch.nn.functional.rms_norm(x, (WIDTH,)) * self.read, weight)
        logits = x @ self.embedding.t() / WIDTH**0.5
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@pytest.fixture
def model(monkeypatch):
    model = Model()
    layers = []
    for number, weight in enumerate(model.weights):
        name = f"decoder.layers.{number}.mlp.linear_fc1"
        setattr(weight, LABEL, name)
        layers.append(FoundLayer(Layer(name, LINEAR, "Linear"), model, weight))
    monkeypatch.setattr(sensitivity, "find_layers", lambda model: layers)
    monkeypatch.setattr(sensitivity, "watched_step", lambda model, args: nullcontext())
    return model


def measure(model, kind="block", options=None, told=lambda done, total: None):
    with using(options or QuantConfig(asked=TYPES)):
        facts = sensitivity.measure(model, Namespace(), BATCHES, kind, told)
    return facts, {change["name"]: change for change in facts["changes"]}


def test_a_layer_with_planted_outliers_changes_the_most(model):
    _, before = measure(model)
    for number, weight in enumerate(model.weights):
        name = f"decoder.layers.{number}.*"
        plain = weight.detach().clone()
        with torch.no_grad():
            weight[:, IDLE] = 60.0
        _, changes = measure(model)
        assert max(changes.values(), key=lambda change: change["gradient"])["name"] == name
        assert changes[name]["gradient"] > 1.5 * before[name]["gradient"]
        # The model is the same, and so are the changes of the other layers.
        assert changes | {name: before[name]} == before
        with torch.no_grad():
            weight.copy_(plain)


def test_the_backward_gemms_change_the_gradient_and_not_the_loss(model):
    facts, changes = measure(model, "gemm")
    assert list(changes) == ["fprop", "dgrad", "wgrad"]
    for name in ("dgrad", "wgrad"):
        assert (changes[name]["loss"], changes[name]["loss_error"]) == (0, 0)
        assert 0.01 < changes[name]["gradient"] < 0.5
    assert changes["fprop"]["loss"] == facts["everything"]["loss"] != 0
    assert (facts["tokens"], facts["everything"]["weights"]) == (TOKENS, LAYERS * WIDTH**2)


def test_the_order_of_the_passes_changes_nothing(model):
    stochastic = {f"fprop.{o}": OperandRow(rounding="stochastic") for o in ("x", "weight")}
    options = QuantConfig(asked=TYPES, operands=stochastic, cache_weights=True)
    assert measure(model, options=options)[0] == measure(model, options=options)[0]
    alone = {}
    for number in range(LAYERS):
        name = f"decoder.layers.{number}.*"
        alone[name] = measure(model, options=QuantConfig(asked=TYPES, include=(name,)))
    for name, change in measure(model)[1].items():
        assert alone[name][0]["everything"] == change | {"name": sensitivity.EVERYTHING}


def test_without_quantization_nothing_changes(model):
    with using(unquantized(QuantConfig(asked=TYPES))):
        first, second = (sensitivity.run_passes(model, BATCHES) for _ in range(2))
    assert sensitivity.differences(first, second) == (0, 0, 0)
    with pytest.raises(SavedError, match="Nothing"):
        measure(model, options=QuantConfig(asked=dict.fromkeys(TYPES, "none")))
    plain = {f"{site}.{o}": OperandRow("none") for site, o in (("fprop", "x"), ("fprop", "weight"))}
    with pytest.raises(SavedError, match="Nothing"):
        measure(model, options=QuantConfig(asked={"fprop": "mixed"}, operands=plain))


def test_the_gradient_is_that_of_the_mean_loss_over_all_batches(model):
    with using(QuantConfig()):
        result = sensitivity.run_passes(model, BATCHES)
    losses = [sensitivity.token_losses(model, batch).flatten() for batch in BATCHES]
    expected = torch.autograd.grad(torch.cat(losses).mean(), list(model.parameters()))
    assert result.losses.tolist() == torch.cat(losses).tolist()
    torch.testing.assert_close(result.gradient, list(expected))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_differences_are_relative_to_the_gradient_and_paired_by_token():
    plain = sensitivity.Passes(torch.tensor([1.0, 2.0, 3.0]), [torch.tensor([3.0, 4.0])])
    other = sensitivity.Passes(torch.tensor([2.0, 2.0, 4.0]), [torch.tensor([3.0, 3.0])])
    loss, error, gradient = sensitivity.differences(plain, other)
    assert loss == pytest.approx(2 / 3)
    assert error == pytest.approx(torch.tensor([1.0, 0, 1]).std().item() / 3**0.5)
    assert gradient == pytest.approx(1 / 5)


def test_the_progress_is_told(model):
    told = []
    measure(model, told=lambda *counts: told.append(counts))
    assert told == [(0, 3), (1, 3), (2, 3)]
