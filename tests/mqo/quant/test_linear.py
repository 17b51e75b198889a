"""QuantLinear: the bits of Megatron's layer, and what users of PyTorch do with a layer."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from mqo.project import Project
from mqo.quant.backend import ENVIRONMENT_VARIABLE
from mqo.quant.config import parse
from mqo.quant.gemms import gemm_operands
from mqo.quant.labels import LABEL
from mqo.quant.layer_rules import LayerRule
from mqo.quant.linear import QuantLinear
from mqo.quant.operand_table import OperandRow
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.progress import set_step
from mqo.quant.quant_config import QuantConfig
from mqo.quant.quantization import PROCESS, ModelQuantization
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_files import names
from mqo.quant.recipe_operands import LINEAR_SITES
from torch import nn

from .tensors import wide_dtypes

K, N = 160, 96
NAME = "decoder.layers.0.mlp.linear_fc1"
STOCHASTIC = OperandRow(rounding="stochastic", hadamard=16, signs="random")
OPTIONS = {
    **{kind: {"types": kind} for kind in ("mxfp8", "mxfp4", "nvfp4", "hifp8", "fp8_tensor")},
    **{f"recipe {name}": {"recipe": name} for name in names() if name not in ("quest", "sagebwd")},
    "random": {
        "types": "nvfp4",
        "operands": {
            "fprop.weight": OperandRow(tile="square"),
            "dgrad.grad": OperandRow(rounding="stochastic"),
            "wgrad.grad": STOCHASTIC,
            "wgrad.x": OperandRow(hadamard=16, signs="random"),
        },
        "seed": 5,
        "cache_weights": True,
    },
    "packed": {"types": "mxfp8", "save_activations": "packed"},
    "source": {
        "types": "nvfp4",
        "operands": {
            "fprop.x": STOCHASTIC,
            "fprop.weight": STOCHASTIC,
            "dgrad.weight": OperandRow(source="fprop"),
            "wgrad.x": OperandRow(source="fprop", quant_type="none"),
        },
    },
}
# But not QuEST, whose gradients Megatron's layers get from hooks.
EXAMPLES = ("averis", "four_over_six", "ms_eden", "ue5m3")
OPTIONS |= {f"quantizer {name}": {"types": name} for name in EXAMPLES}


def config(types="none", recipe=None, **options):
    if types in EXAMPLES:
        load_quantizers(Project.here().root / f"tools/mqo/quant/recipes/{types}.py")
    if recipe:
        return replace(Recipe.load(recipe).config(), **options)
    return QuantConfig(asked=dict.fromkeys(LINEAR_SITES, types), **options)


def normal(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.exp2(torch.arange(shape[-1]) % 7 - 3.0)).to(dtype)


def quant_linear(options, dtype=torch.float32, bias=False):
    layer = QuantLinear(K, N, bias, quantization=ModelQuantization(options), name=NAME, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(0.02 * normal(N, K, seed=1))
        if bias:
            layer.bias.copy_(normal(N, seed=3))
    return layer


def passes(multiply, weight, count=2):
    """y, dX and the sum of dW over some micro-batches."""
    results = []
    for number in range(count):
        x = normal(5, 3, K, seed=10 + number, dtype=weight.dtype).requires_grad_()
        y = multiply(x)
        y.backward(1e-3 * normal(5, 3, N, seed=20 + number, dtype=weight.dtype))
        results += [y.detach(), x.grad]
    return [*results, weight.grad]


@wide_dtypes
@pytest.mark.parametrize("case", OPTIONS)
def test_all_bits_are_those_of_megatrons_layer(monkeypatch, assert_same_bits, case, dtype):
    layers = pytest.importorskip("megatron.core.tensor_parallel.layers")
    # A kernel for each case takes long to compile.
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    options = config(**OPTIONS[case])
    monkeypatch.setattr(type(PROCESS), "options", options)
    monkeypatch.setattr(
        layers, "gemm_operands", lambda site, _, weight: gemm_operands(site, asked[site], weight)
    )
    asked, layer = options.asked, quant_linear(options, dtype)
    weight = nn.Parameter(layer.weight.detach().clone())
    setattr(weight, LABEL, NAME)
    sites = layers.LinearWithGradAccumulationAndAsyncCommunication
    rest = (None, False, False, False, None, None, None, 1)
    set_step(3)
    theirs = passes(lambda x: sites.apply(x, weight, *rest), weight)
    layer.quantization.set_step(3)
    for ours, expected in zip(passes(layer, layer.weight), theirs, strict=True):
        assert_same_bits(ours, expected)


def test_the_options_of_the_process_and_of_another_model_have_no_effect(monkeypatch):
    layer, other = quant_linear(config("mxfp8")), quant_linear(config("mxfp4"))
    x = normal(4, K)
    alone = layer(x)
    monkeypatch.setattr(type(PROCESS), "options", config("hifp8"))
    other(x)
    assert layer(x).equal(alone) and not other(x).equal(alone)
    assert [record.calls for record in layer.quantization.records()] == [2, 2]


@wide_dtypes
def test_without_types_it_is_torchs_layer(dtype):
    layer = quant_linear(QuantConfig(), dtype, bias=True)
    plain = nn.Linear(K, N, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    ours, theirs = passes(layer, layer.weight), passes(plain, plain.weight)
    close = 1e-6 if dtype == torch.float32 else 2e-2
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, expected, rtol=close, atol=close)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("shape", [(K,), (1, K), (0, K), (2, 3, 4, K)])
def test_inputs_have_any_leading_shape(shape):
    layer = quant_linear(config("nvfp4"))
    x = torch.ones(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], N)
    y.sum().backward()
    assert x.grad.shape == shape and layer.weight.grad.shape == (N, K)


def test_frozen_tensors_have_no_gradient_and_their_gemms_do_not_run():
    layer = quant_linear(config("mxfp8")).requires_grad_(False)
    x = normal(4, K).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    assert {record.site for record in layer.quantization.records()} == {"fprop", "dgrad"}


def test_autocast_rounds_operands_of_its_dtype():
    layer, x = quant_linear(config("mxfp8"), bias=True), normal(4, K)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.sum().backward()  # also within the block
    narrow = quant_linear(config("mxfp8"), torch.bfloat16, bias=True)
    assert y.dtype == torch.bfloat16 and y.equal(narrow(x.bfloat16()))
    assert layer.weight.grad.dtype == torch.float32


def test_a_copy_and_a_saved_model_have_options_and_counts_of_their_own():
    layer = quant_linear(config("mxfp4", rounding="stochastic"))
    first = layer(normal(4, K))
    x = normal(4, K)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.quantization is not layer.quantization and twin.name == NAME
        assert twin(x).equal(copy.deepcopy(layer)(x)) and not twin(x).equal(first)
    assert [record.calls for record in layer.quantization.records()] == [1, 1]


def test_the_state_dict_is_torchs():
    assert list(quant_linear(config("mxfp4"), bias=True).state_dict()) == ["weight", "bias"]


def test_each_optimizer_step_of_the_process_draws_anew_until_the_step_is_set():
    options = config("mxfp4", rounding="stochastic", cache_weights=True)
    layer, x = quant_linear(options), normal(4, K)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    outputs = []
    for _ in range(3):
        outputs.append(layer(x))
        outputs[-1].sum().backward()
        optimizer.step()
    assert layer.quantization.step == 3
    assert not outputs[0].equal(outputs[1])
    layer.quantization.set_step(0)
    assert layer(x).equal(outputs[0])
    optimizer.step()
    layer.quantization.set_step(1)
    assert layer(x).equal(outputs[1]) and layer.quantization.step == 1


def test_a_schedule_and_rules_change_the_types():
    text = '[asked]\nfprop = "mxfp4"\n[schedule]\nfprop = "mxfp4 until 1, then bf16"\n'
    layer, x = quant_linear(parse(text)), normal(4, K)
    assert layer.quantization.types_of(NAME) == {"fprop": "mxfp4"}
    layer.quantization.set_step(1)
    assert layer(x).equal(x @ layer.weight.t())
    ruled = quant_linear(config("mxfp4", rules=(LayerRule(NAME, "mxfp8"),)))
    assert ruled(x).equal(quant_linear(config("mxfp8"))(x))


def test_measurements_are_of_the_block():
    layer = quant_linear(config("mxfp8"))
    layer(normal(4, K))
    with layer.quantization.measuring() as measurements:
        layer(normal(4, K).requires_grad_()).sum().backward()
    assert {(m.site, m.operand) for m in measurements} == {
        *(("fprop", "x"), ("fprop", "weight"), ("dgrad", "grad"), ("dgrad", "weight")),
        *(("wgrad", "grad"), ("wgrad", "x")),
    }
    assert all(m.layer == NAME and m.sqnr_db > 20 for m in measurements)


def test_a_compiled_model_returns_the_same_bits():
    model = nn.Sequential(quant_linear(config("nvfp4")), nn.ReLU())
    x = normal(4, K).requires_grad_()
    eager = model(x)
    compiled = torch.compile(model, backend="eager")(x)
    assert compiled.equal(eager)
    compiled.sum().backward()
    assert x.grad is not None and model[0].weight.grad is not None


def test_a_frozen_layer_keeps_no_input():
    layer = quant_linear(config("mxfp8")).requires_grad_(False)
    x = normal(4, K).requires_grad_()
    h = x * 1
    y = layer(h)
    h.add_(1)  # as with torch.nn.Linear
    y.sum().backward()
    assert x.grad is not None


def test_evaluations_draw_equal_numbers_and_change_no_others():
    layers = [quant_linear(config("mxfp4", rounding="stochastic")) for _ in range(2)]
    x = normal(4, K).requires_grad_()
    layers[0].eval()
    with torch.no_grad():
        assert layers[0](x).equal(layers[0](x))
    layers[0].train()
    checkpoint = torch.utils.checkpoint.checkpoint
    y = checkpoint(layers[0], x, use_reentrant=False)
    y.sum().backward()
    recomputed, x.grad = x.grad, None
    layers[1](x).sum().backward()
    assert recomputed.equal(x.grad)
    assert layers[0].weight.grad.equal(layers[1].weight.grad)


def test_a_pickled_model_counts_the_steps_of_its_process(tmp_path):
    layer = quant_linear(config("mxfp4", rounding="stochastic"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer(normal(4, K)).sum().backward()
    optimizer.step()
    saved = pickle.dumps(layer)
    optimizer.step()
    twin = pickle.loads(saved)
    assert twin.quantization.step == 1
    twin(normal(4, K))
    assert twin.quantization.step == 1
