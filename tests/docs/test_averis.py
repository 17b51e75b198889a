"""recipes/averis.py: the terms of each operand, and the products of a layer."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from mqo.project import Project
from mqo.quant import QuantSpec, check_quantizer, fake_quantize, quantize_model, sqnr
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugins import PLUGINS
from mqo.quant.stochastic import derive_seed, draws, split_seed
from torch import nn
from torch.nn import functional

from ..oracles.compared import documented
from ..oracles.elements import E2M1, E4M3, nearest, stochastic, to_dtype
from .training import losses_of

FILE = Project.here().root / "tools/mqo/quant/recipes/averis.py"
F32 = np.float32
NEAREST = {"rounding": "nearest-even"}
# Nothing saturates: the largest element of a block is 448 times a float32 scale.
FP8 = {"format": "fp8_block_fp32"}
# (site, operand): the axis of the blocks of an operand [tokens, features], or of a weight.
AXES = {
    ("fprop", "x"): 1,
    ("fprop", "weight"): 1,
    ("dgrad", "grad"): 1,
    ("dgrad", "weight"): 0,
    ("wgrad", "grad"): 0,
    ("wgrad", "x"): 0,
}
SPLIT = [key for key in AXES if key[1] != "weight"]
# Tokens, input features and output features.
SHAPES = [(37, 40, 24), (48, 64, 32), (5, 7, 3), (1, 40, 24), (130, 72, 40)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_operand = pytest.mark.parametrize(("site", "operand"), AXES)


@pytest.fixture(autouse=True)
def averis():
    load_quantizers(FILE)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KINDS = ["normal", "means", "outliers", "scales", "equal tokens", "means of zero", "zeros"]


def data_of(kind, tokens, features, seed=0):
    """Numbers [tokens, features] whose sums are exact in float32, in any order.

    They are integers of 8 bits, which bfloat16 has, too, times a power of two for each feature.
    """
    x, mean = normal(tokens, features, seed=seed), normal(features, seed=seed + 100)
    if kind == "means":
        x = 8 * x + 60 * mean
    elif kind == "outliers":
        x = 20 * x
        x[:, ::7] += 120
    elif kind == "equal tokens":
        x = (60 * mean).expand(tokens, features)
    elif kind == "zeros":
        x = torch.zeros(tokens, features)
    elif kind == "means of zero":
        half = normal(tokens // 2, features, seed=seed)
        x = 40 * torch.cat([half, -half, torch.zeros(tokens % 2, features)])
    else:
        x = 40 * x + 20 * mean
    x = x.round().clamp(-255, 255)
    if kind == "scales":  # block scales of E4M3's subnormals, and blocks that become zero
        x = x * 2.0 ** -(torch.arange(features) // 3 % 24)
    return x


# -- the terms, number by number -------------------------------------------------------------------


def nvfp4(x, seed=None):
    """Float32 [rows, K] -> its values without the scale of the tensor, and that scale."""
    amax = max(F32(abs(v)) for v in x.flat)
    g = F32(2688) / amax if amax else F32(1)
    h = F32(1) / g
    numbers = None if seed is None else draws(torch.Size(x.shape), seed).numpy()
    values = np.zeros_like(x)
    for row, left in product(range(len(x)), range(0, x.shape[1], 16)):
        block = range(left, min(left + 16, x.shape[1]))
        largest = max(F32(abs(x[row, i])) for i in block)
        scale = F32(nearest(min(largest * (g * F32(1 / 6)), F32(448)), E4M3))
        d = scale * h
        e = F32(1) / d if d else np.finfo(F32).max
        for i in block:
            with np.errstate(over="ignore"):  # in a block whose scale is 0
                step = x[row, i] * e
            if numbers is None:
                element = nearest(step, E2M1)
            else:
                element = stochastic(step, E2M1, numbers[row, i])
            values[row, i] = F32(element) * scale
    return values, float(h)


def along(x, axis, seed=None):
    """The same with blocks along an axis, of the transpose if that is 0."""
    values, alpha = nvfp4(x if axis == 1 else np.ascontiguousarray(x.T), seed)
    return (values if axis == 1 else values.T), alpha


def terms_of(x, site, operand, seed=None):
    """Float32 [tokens, features], or a weight -> [(values, alpha)].

    Seeds 1 and 2 of the operand are those of the mean, and of the rest.
    """
    first, second = (None if seed is None else split_seed(seed, n) for n in (1, 2))
    if operand == "weight":
        return [along(x, AXES[site, operand], first)]
    tokens, features = x.shape
    # Exact sums, rounded once: float64 has more than twice the bits of float32.
    mean = [F32(math.fsum(x[:, i]) / tokens) for i in range(features)]
    rest = np.array([[x[t, i] - mean[i] for i in range(features)] for t in range(tokens)], F32)
    values, alpha = nvfp4(np.array([mean], F32), first)
    return [(values.repeat(tokens, axis=0), alpha), along(rest, AXES[site, operand], second)]


def rounded(x, site, operand, seed=0, **options):
    """Return the terms of an operand of a layer, [(values, alpha)]."""
    model = nn.Sequential(nn.Linear(1, 1))
    quantize_model(model, "averis", seed=seed, plugin_options={"averis": options})
    operands = model[0].operands(site)
    operands.product(torch.matmul)
    side = "lhs" if operand == operands.site.lhs else "rhs"
    joined, alphas = getattr(operands, side)(x), operands.alphas
    alphas = getattr(alphas, side), *getattr(alphas, f"{side}_rest")
    return list(zip(joined.chunk(len(alphas), AXES[site, operand]), alphas, strict=True))


def value(terms):
    """Return the sum of terms, float64."""
    return sum(values.double() * alpha for values, alpha in terms)


def assert_equal_bits(terms, expected):
    assert [alpha for _, alpha in terms] == [alpha for _, alpha in expected]
    for (ours, _), (values, _) in zip(terms, expected, strict=True):
        patterns = [array.view(np.int32).tolist() for array in (ours.float().numpy(), values)]
        assert patterns[0] == patterns[1]


def test_the_number_of_compared_values_is_the_documented_one():
    """A weight is one term, other operands are two; bfloat16 too, and two seeds for some."""
    terms = [1 if operand == "weight" else 2 for _, operand in AXES]
    nearest_even = 2 * len(KINDS) * sum(shape[0] * shape[1] for shape in SHAPES)
    drawn = 2 * len(DRAWN_KINDS) * 37 * 40
    assert documented("averis") == sum(terms) * (nearest_even + drawn)


@every_operand
@every_shape
@pytest.mark.parametrize("kind", KINDS)
def test_the_terms_are_the_definition_bit_for_bit(kind, shape, site, operand):
    x = data_of(kind, *shape[:2])
    expected = terms_of(x.numpy(), site, operand)
    assert_equal_bits(rounded(x, site, operand, **NEAREST), expected)
    assert_equal_bits(rounded(x.bfloat16(), site, operand, **NEAREST), expected)


DRAWN_KINDS = ("normal", "means", "scales")


@every_operand
@pytest.mark.parametrize("kind", DRAWN_KINDS)
def test_stochastic_terms_are_the_definition_bit_for_bit(kind, site, operand):
    x = data_of(kind, 37, 40)
    for seed in (3, 2**63 + 5):
        position = {"step": 0, "micro_batch": 0, "shard": 0, "layer": "0"}
        of_operand = derive_seed(seed, site=site, operand=operand, **position)
        expected = terms_of(x.numpy(), site, operand, of_operand)
        assert_equal_bits(rounded(x, site, operand, seed), expected)


def test_a_tensor_of_no_model_has_tokens_as_rows():
    x = data_of("means", 37, 40)
    (mean, a), (rest, b) = terms_of(x.numpy(), "fprop", "x")
    result = fake_quantize(x, QuantSpec("averis", options=NEAREST), seed=0)
    assert result.equal(torch.from_numpy(F32(a) * F32(mean) + F32(b) * F32(rest)))


@pytest.mark.parametrize("key", SPLIT)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_makes_all_terms_nan(key, bad):
    x = data_of("means", 37, 40)
    x[3, 5] = bad
    for values, _ in rounded(x, *key):
        assert values.isnan().all()


# -- what the terms are for ------------------------------------------------------------------------


@pytest.mark.parametrize("operand", ["x", "grad"])
def test_all_gemms_have_the_same_mean(operand):
    """Its blocks have features in wgrad as well, where those of the rest have tokens."""
    x = data_of("means", 37, 40)
    of_features = "fprop" if operand == "x" else "dgrad"
    mean, in_wgrad = (rounded(x, site, operand, **NEAREST)[0] for site in (of_features, "wgrad"))
    assert mean[0].equal(in_wgrad[0]) and mean[1] == in_wgrad[1]


@pytest.mark.parametrize("key", SPLIT)
def test_differences_of_tokens_are_as_exact_as_without_means(key):
    noise = normal(256, 512)
    x = noise + 30 * normal(512, seed=1)
    rest = noise - noise.mean(0)
    axis = AXES[key]

    def decibels(result):
        """The SQNR of the differences from the mean over tokens."""
        own = result.double() - result.double().mean(0)
        return (10 * ((rest**2).sum() / ((own - rest) ** 2).sum()).log10()).item()

    ours = decibels(value(rounded(x, *key, **NEAREST)))
    assert abs(ours - sqnr(rest, "nvfp4", axis=axis)) < 0.1
    assert ours > 19.5
    if axis == 1:  # blocks of tokens hold a single mean, so theirs are better
        assert decibels(fake_quantize(x, "nvfp4", axis=axis)) < 0


# -- the products of a layer -----------------------------------------------------------------------


def layer_of(weight, **options):
    """Return a model of one layer, and what `quantize_model` returns."""
    model = nn.Sequential(nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype))
    model[0].weight.data.copy_(weight)
    return model, quantize_model(model, "averis", plugin_options={"averis": options})


def products(model, x, grad):
    """Return y, dX and dW."""
    x, (weight,) = x.clone().requires_grad_(), model.parameters()
    weight.grad = None
    y = model(x)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


def sums_of_products(x, grad, weight):
    """Return the same by Equations 11 and 12, float64, each with the sum of all magnitudes."""

    def terms(tensor, site, operand):
        return [F32(v) * np.float64(a) for v, a in terms_of(tensor.numpy(), site, operand)]

    def sums(lefts, rights):
        pairs = list(product(lefts, rights))
        bound = sum(np.abs(left) @ np.abs(right) for left, right in pairs)
        return sum(left @ right for left, right in pairs), bound

    (of_fprop,), (of_dgrad,) = (terms(weight, site, "weight") for site in ("fprop", "dgrad"))
    grads = [term.T for term in terms(grad, "wgrad", "grad")]
    return [
        sums(terms(x, "fprop", "x"), [of_fprop.T]),  # 2 products
        sums(terms(grad, "dgrad", "grad"), [of_dgrad]),  # 2
        sums(grads, terms(x, "wgrad", "x")),  # 4
    ]


def tensors_of(kind, tokens, inputs, outputs):
    x, grad = data_of(kind, tokens, inputs), data_of(kind, tokens, outputs, seed=1)
    return x, grad, data_of("normal", outputs, inputs, seed=2) / 256


@every_shape
@pytest.mark.parametrize("kind", ["normal", "means", "outliers"])
def test_a_layer_computes_all_products_of_terms(kind, shape):
    x, grad, weight = tensors_of(kind, *shape)
    model, _ = layer_of(weight, **NEAREST)
    results = products(model, x, grad)
    for ours, (exact, bound) in zip(results, sums_of_products(x, grad, weight), strict=True):
        assert ours.shape == exact.shape
        # The rounding of float32 sums; a product that is missing is larger.
        assert (np.abs(ours.numpy() - exact) <= 1e-6 * bound).all()


@pytest.mark.parametrize("kind", ["normal", "means", "outliers"])
def test_a_layer_in_bfloat16_rounds_the_sum_once(kind):
    x, grad, weight = (tensor.bfloat16() for tensor in tensors_of(kind, 130, 72, 40))
    model, _ = layer_of(weight, **NEAREST)
    results = products(model, x, grad)
    tensors = [tensor.float() for tensor in (x, grad, weight)]
    for ours, (exact, _) in zip(results, sums_of_products(*tensors), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float().numpy() == to_dtype(exact, "bfloat16")).mean() > 0.999


def test_a_batch_of_sequences_has_one_mean():
    x, grad, weight = tensors_of("means", 24, 40, 16)
    model, _ = layer_of(weight, **NEAREST)
    flat = products(model, x, grad)
    cut = products(model, x.unflatten(0, (4, 6)), grad.unflatten(0, (4, 6)))
    for ours, expected in zip(cut, flat, strict=True):
        assert ours.flatten(0, -2).equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["nearest-even", "stochastic"])
def test_an_expert_may_have_no_token(dtype, rounding):
    model, _ = layer_of(data_of("normal", 24, 40).to(dtype), rounding=rounding)
    y, of_x, of_weight = products(model, *(torch.empty(0, n, dtype=dtype) for n in (40, 24)))
    assert (y.shape, of_x.shape) == ((0, 24), (0, 40))
    assert of_weight.shape == (24, 40) and of_weight.eq(0).all()


def test_an_expert_with_one_token_rounds_its_mean_alone():
    x, grad, weight = tensors_of("normal", 1, 40, 24)
    model, _ = layer_of(weight, **NEAREST)
    y, _, of_weight = products(model, x, grad)
    own, theirs = (fake_quantize(tensor, "nvfp4") for tensor in (x, grad))
    torch.testing.assert_close(y, own @ fake_quantize(weight, "nvfp4").t())
    torch.testing.assert_close(of_weight, theirs.t() @ own)


# -- stochastic rounding ---------------------------------------------------------------------------


def largest_z(results, exact):
    """The z-score of a mean of many draws: of all errors, toward +Inf, and away from zero."""
    deviation = results.std(0)
    inner = deviation > 1e-5 * results.abs().amax()
    assert inner.double().mean() > 0.5
    z = (results.mean(0) - exact)[inner] / (deviation[inner] / len(results) ** 0.5)
    count = z.numel()
    squares = abs((z**2).mean().item() - 1) * (count / 2) ** 0.5
    sums = [z.sum(), (z * exact[inner].sign()).sum()]
    return max(squares, *(abs(total.item()) / count**0.5 for total in sums))


def draws_of(x, site, operand, count=400, **options):
    """Return the values of each term, float64 [count, ...], and what they are without rounding.

    All tokens have the same mean, which is there once.
    """
    results = [rounded(x, site, operand, seed, **options) for seed in range(count)]
    terms = [torch.stack([value([term]) for term in terms]) for terms in zip(*results, strict=True)]
    if operand == "weight":
        return [(terms[0], x.double())]
    mean = x.mean(0, keepdim=True)
    return [(terms[0][:, :1], mean.double()), (terms[1], (x - mean).double())]


@every_operand
def test_it_is_unbiased_where_nothing_saturates(site, operand):
    for values, exact in draws_of(data_of("means", 21, 40), site, operand, **FP8):
        assert largest_z(values, exact) < 5


def test_products_of_a_layer_are_unbiased_where_nothing_saturates():
    x, grad, weight = tensors_of("means", 6, 20, 12)
    model, quantization = layer_of(weight, **FP8)
    results = []
    for step in range(200):
        quantization.set_step(step)
        results.append(products(model, x, grad))
    exact = x @ weight.t(), grad @ weight, grad.t() @ x
    for ours, expected in zip(zip(*results, strict=True), exact, strict=True):
        # Outputs share the errors of operands, so that their z-scores are not independent.
        values = torch.stack(ours).double()
        z = (values.mean(0) - expected) / (values.std(0) / len(results) ** 0.5)
        assert z.abs().max() < 5


def faults():
    return [finding.check for finding in check_quantizer("averis").findings if finding.fault]


@pytest.mark.parametrize("options", [{}, NEAREST, FP8])
def test_the_check_finds_no_fault(options):
    """Its blocks do not saturate, as those of NVFP4 do if a scale is rounded down to E4M3."""
    plugin = PLUGINS["averis"]
    PLUGINS["averis"] = replace(plugin, options=plugin.options | options)
    assert faults() == []


def test_elements_of_nvfp4_that_do_not_saturate_are_unbiased():
    mean, rest = draws_of(data_of("means", 21, 40), "fprop", "x")
    for values, exact in (mean, rest):
        # The largest value of a block: 6, times its scale.
        blocks = functional.pad(values.abs().amax(0), (0, 8)).unflatten(1, (3, 16))
        limits = blocks.amax(2).repeat_interleave(16, dim=1)[:, :40]
        kept = exact.abs() <= limits
        assert largest_z(values[:, kept], exact[kept]) < 5
        assert (values[:, ~kept].abs() < exact[~kept].abs()).all()
    assert 0 < (~kept).double().mean() < 0.1


# -- as a plugin -----------------------------------------------------------------------------------


def test_a_model_trains_with_it():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    quantization = quantize_model(model, "averis")
    x = normal(64, 32) + 3 * normal(32, seed=1)
    losses = losses_of(model, x, 30, before=quantization.set_step)
    assert losses[-1] < 0.5 * losses[0]
