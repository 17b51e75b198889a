"""Recipes against their oracle: each operand to the bit, and what the patched layer returns."""

import numpy as np
import pytest
import torch
from mqo.launch.config import resolve
from mqo.quant.gemms import gemm_operands
from mqo.quant.hadamard import signs_of
from mqo.quant.labels import LABEL
from mqo.quant.progress import set_step
from mqo.quant.spec import Hadamard
from mqo.quant.stochastic import derive_seed, draws
from mqo.recipes import recipe as recipes
from torch.nn import Parameter

from ...oracles.compared import COMPARED, documented
from ...oracles.recipes import GEMMS, RECIPES, drawn_shapes, linear

layers = pytest.importorskip("megatron.core.tensor_parallel.layers")

NAMES = {"x": "x", "w": "weight", "g": "grad"}  # what the oracle calls an operand -> its name here
SEQUENCE, BATCH, K, N = 45, 2, 160, 200  # no multiples of what is quantized or transformed at once
STEP = 3

UNBIASED = "mxfp4-backward"
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture
def types(options, recipe):
    """{site: what its literal says}, with the quant.toml of a run by the recipe in force."""
    config = resolve("llama32-1b", "wikipedia", "bf16", "tiny", recipe=recipes.read(recipe))
    literals = {site: config.quantization.types[site] for site in GEMMS}
    options(config.quant_toml(literals))
    return literals


@pytest.fixture(autouse=True)
def a_step():
    set_step(STEP)


def spread(*shape, seed, size):
    """Normal numbers whose last axis has scales, and which have a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(*shape, generator=generator)
    x *= torch.exp2(torch.randint(-4, 5, shape[-1:], generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 1e-3, 100 * x, x)


def tensors(dtype):
    """x [s, b, K], w [N, K] and g [s, b, N]."""
    return {
        "x": spread(SEQUENCE, BATCH, K, seed=1, size=1.0).to(dtype),
        "w": spread(N, K, seed=2, size=0.02).to(dtype),
        "g": spread(SEQUENCE, BATCH, N, seed=3, size=1e-4).to(dtype),
    }


def seed_of(site, operand):
    place = {"site": site, "operand": operand, "layer": "unlabeled"}
    return derive_seed(0, step=STEP, micro_batch=0, shard=0, **place)


def oracle(recipe, given):
    """What the oracle makes of the tensors, with the numbers that are drawn here."""
    matrices = {name: t.flatten(0, -2).float().numpy() for name, t in given.items()}
    drawn = {
        (site, name): draws(torch.Size(shape), seed_of(site, NAMES[name])).numpy()
        for (site, name), shape in drawn_shapes(recipe, matrices).items()
    }
    random = Hadamard(64, "random")
    signs = {site: signs_of(random, seed_of(site, "signs")).numpy() for site in GEMMS}
    dtype = str(given["x"].dtype).removeprefix("torch.")
    return linear(recipe, matrices, dtype=dtype, draws=drawn, signs=signs)


def operands(site, literal, given):
    """What the GEMM sees: {operand: float32 [rows, contraction]}, as the oracle has it."""
    bound, found = gemm_operands(site, literal, given["w"]), {}
    for (name, axis), quantize in zip(GEMMS[site], (bound.lhs, bound.rhs), strict=True):
        # The layer flattens what wgrad multiplies.
        tensor = given[name].flatten(0, -2) if site == "wgrad" else given[name]
        quantized = quantize(tensor)
        assert quantized.dtype == tensor.dtype
        rows = quantized.detach().flatten(0, -2).movedim(axis, -1)
        found[name] = rows.float().numpy()
    return found


@every_recipe
def test_operands_of_float32_are_the_oracles(types, recipe):
    given = tensors(torch.float32)
    for site, expected in oracle(recipe, given).items():
        lhs, rhs = operands(site, types[site], given).values()
        assert np.array_equal(lhs, expected.lhs), f"left operand of {site}"
        assert np.array_equal(rhs, expected.rhs), f"right operand of {site}"


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != UNBIASED])
def test_operands_of_bfloat16_are_the_oracles(types, recipe):
    given = tensors(torch.bfloat16)
    for site, expected in oracle(recipe, given).items():
        lhs, rhs = operands(site, types[site], given).values()
        assert np.array_equal(lhs, expected.lhs), f"left operand of {site}"
        assert np.array_equal(rhs, expected.rhs), f"right operand of {site}"


def test_every_recipe_has_an_oracle():
    assert sorted(COMPARED) == recipes.names()


@every_recipe
def test_the_number_of_compared_values_is_the_documented_one(recipe):
    values = 0
    for dtype in (torch.float32,) if recipe == UNBIASED else (torch.float32, torch.bfloat16):
        for site, expected in oracle(recipe, tensors(dtype)).items():
            pairs = zip(GEMMS[site], (expected.lhs, expected.rhs), strict=True)
            values += sum(array.size for (n, _), array in pairs if (site, n) in RECIPES[recipe])
    # The operands of attention are compared in megatron/attention/test_recipes.py.
    linear = "fp8-tensorwise" if recipe == "fp8-tensorwise-attention" else recipe
    assert values == documented(linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("recipe", "part", "own"),
    [
        ("mxfp4-qkv-mxfp8", "linear_qkv", "mxfp8"),
        ("nvfp4-nemotron3", "linear_qkv", None),
        ("nvfp4-nemotron3", "linear_proj", None),
    ],
)
def test_layers_of_a_rule_have_the_operands_of_its_recipe(types, part, own, dtype):
    """Where the rule's type is 'none', they are the tensors themselves."""
    given = tensors(dtype)
    given["w"] = Parameter(given["w"])
    setattr(given["w"], LABEL, f"decoder.layers.0.self_attention.{part}")
    plain = {name: t.detach() for name, t in given.items()}
    for site, pair in GEMMS.items():
        found = operands(site, types[site], given)
        for side, (name, axis) in zip(("lhs", "rhs"), pair, strict=True):
            if own:
                expected = getattr(oracle(own, plain)[site], side)
            else:
                expected = plain[name].flatten(0, -2).movedim(axis, -1).float().numpy()
            assert np.array_equal(found[name], expected), f"{name} of {site}"


@pytest.mark.parametrize("recipe", [UNBIASED])
@pytest.mark.parametrize("site", ["dgrad", "wgrad"])
def test_unbiased_mxfp4_of_bfloat16_has_half_the_scale_where_amax_is_a_power_of_two(
    types, recipe, site
):
    """Published is the scale of x by floor; that of 3/4 x by rceil is half of it there alone."""
    given = tensors(torch.bfloat16)
    expected = oracle(recipe, given)[site]
    found = operands(site, types[site], given).values()
    for actual, right in zip(found, (expected.lhs, expected.rhs), strict=True):
        blocks = (actual != right).reshape(len(right), -1, 32).any(-1)
        assert 0 < blocks.mean() < 0.02
        assert np.linalg.norm(actual - right) < 0.05 * np.linalg.norm(right)


@pytest.fixture
def layer(monkeypatch, types):
    """The patched layer, with the literals in its source."""
    monkeypatch.setattr(
        layers, "gemm_operands", lambda site, _, weight: gemm_operands(site, types[site], weight)
    )
    return layers.LinearWithGradAccumulationAndAsyncCommunication


@every_recipe
def test_the_patched_layer_returns_the_oracles_products(layer, recipe):
    given = tensors(torch.float32)
    x, w = given["x"].clone().requires_grad_(), Parameter(given["w"])
    y = layer.apply(x, w, None, False, False, False, None, None, None, 1)
    y.backward(given["g"])
    expected = oracle(recipe, given)
    for site, found in {"fprop": y, "dgrad": x.grad, "wgrad": w.grad}.items():
        product = expected[site].product
        error = np.linalg.norm(found.detach().flatten(0, -2).double().numpy() - product)
        # The layer sums up to 256 products in float32; measured: 3e-7.
        assert error < 1e-5 * np.linalg.norm(product), site
