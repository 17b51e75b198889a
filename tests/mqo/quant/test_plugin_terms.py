"""Quantizers whose result is a sum of terms: its products, its records, and what is refused."""

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.gemms import GemmOperands, gemm_operands
from mqo.quant.plugin_context import QuantizerError
from mqo.quant.plugin_decorators import quantizer
from mqo.quant.plugin_terms import round_term
from mqo.quant.products import Alphas, with_alphas
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER
from mqo.quant.scales import alpha_of
from mqo.quant.spec import QuantSpec

from .tensors import normal, wide_dtypes
from .test_plugins import layer_of

SITES = {
    "fprop": (lambda lhs, rhs: (lhs, rhs.t()), (6, 72), (40, 72)),
    "dgrad": (lambda lhs, rhs: (lhs, rhs), (6, 40), (40, 72)),
    "wgrad": (lambda lhs, rhs: (lhs.t(), rhs), (24, 40), (24, 72)),
}
every_site = pytest.mark.parametrize("site", SITES)


@pytest.fixture(autouse=True)
def split():
    """x in nvfp4, and what is left of it in mxfp4: two alphas, and blocks along K."""

    @quantizer("split", terms=2)
    def quantize(x, context):
        values, alpha = round_term(x, "nvfp4", context)
        return [(values, alpha), round_term(x - alpha * values, "mxfp4", context)]


def terms_of(x, axis):
    """The two terms of `x`, float32."""
    x = x.float()
    values = fake_quantize(x, QuantSpec("nvfp4", without_alpha=True), axis=axis)
    first = values * alpha_of(x.abs().max().item(), QuantSpec("nvfp4"))
    return first, fake_quantize(x - first, "mxfp4", axis=axis)


def operands_at(site, dtype):
    _, *shapes = SITES[site]
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def product_of(site, kind, tensors, **rows):
    operands = gemm_operands(site, kind, None)
    multiply = operands.product(torch.matmul)
    return multiply(*SITES[site][0](operands.lhs(tensors[0]), operands.rhs(tensors[1])))


@every_site
@wide_dtypes
def test_a_product_is_that_of_the_sums_and_is_rounded_once(site, dtype):
    tensors = operands_at(site, dtype)
    site_axes = {"fprop": (-1, -1), "dgrad": (-1, 0), "wgrad": (0, 0)}[site]
    sums = [sum(terms_of(x, axis)).double() for x, axis in zip(tensors, site_axes, strict=True)]
    left, right = SITES[site][0](*sums)
    exact, result = left @ right, product_of(site, "split", tensors)
    assert result.dtype == dtype and result.shape == exact.shape
    if dtype == torch.float32:
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
    else:
        assert (result == exact.to(dtype)).double().mean() > 0.999


def test_an_operand_of_one_term_multiplies_every_term_of_the_other(options):
    options('[operands]\n"fprop.x" = { quant_type = "split" }\n')
    x, weight = operands_at("fprop", torch.float32)
    exact = sum(terms_of(x, -1)) @ fake_quantize(weight, "mxfp8").t()
    torch.testing.assert_close(product_of("fprop", "mxfp8", [x, weight]), exact)


def test_other_functions_and_attention_get_the_sum():
    x = normal(6, 72, dtype=torch.bfloat16)
    assert gemm_operands("fprop", "split", None).lhs(x).equal(sum(terms_of(x, -1)).bfloat16())
    apart = gemm_operands("fprop", "split", None)
    alphas = apart.separate_alphas()  # as grouped experts do
    assert apart.lhs(x).equal(sum(terms_of(x, -1)).bfloat16()) and alphas == Alphas()
    query, key = normal(2, 5, 64), normal(2, 7, 64, seed=1)
    qk = gemm_operands("qk", "split", None)
    multiply = qk.product(torch.baddbmm)
    unread = torch.empty(2, 5, 7)
    scores = multiply(unread, qk.lhs(query), qk.rhs(key).transpose(1, 2), beta=0.0, alpha=0.5)
    exact = 0.5 * sum(terms_of(query, -1)) @ sum(terms_of(key, -1)).transpose(1, 2)
    torch.testing.assert_close(scores, exact)
    assert GemmOperands().separate_alphas() == Alphas()


@pytest.mark.parametrize("wide", [True, False])
def test_a_main_gradient_gets_the_sum_of_products(wide):
    def wgrad_gemm_accum_fp32(x, grad, main_grad):
        raise AssertionError("it has no terms")

    grads, inputs = (normal(2 * 8, n, seed=n) for n in (5, 6))
    alphas = Alphas(0.5, 2.0, (0.25,), (3.0,))
    main_grad = torch.ones(5, 6)
    x = inputs if wide else inputs.bfloat16()
    grad = grads if wide else grads.bfloat16()
    with_alphas(wgrad_gemm_accum_fp32, alphas)(x, grad, main_grad)
    (d1, d2), (x1, x2) = grad.float().chunk(2), x.float().chunk(2)
    exact = 1 + (0.5 * d1 + 0.25 * d2).t() @ (2 * x1 + 3 * x2)
    torch.testing.assert_close(main_grad, exact)


@wide_dtypes
@pytest.mark.parametrize("cache", [False, True])
def test_a_layer_trains_with_it(dtype, cache):
    """The second micro-batch reads the cached terms."""
    layer = layer_of("split", dtype, cache_weights=cache)
    reference = layer_of("split", dtype)
    for seed in (2, 3):
        x = normal(5, 3, 72, seed=seed, dtype=dtype)
        grads = []
        for own in (layer, reference):
            leaf = x.clone().requires_grad_()
            y = own(leaf)
            y.backward(normal(5, 3, 40, seed=9, dtype=dtype))
            grads.append((y.detach(), leaf.grad))
        assert all(a.equal(b) for a, b in zip(*grads, strict=True))
    assert layer.weight.grad.equal(reference.weight.grad)
    weight = sum(terms_of(layer.weight.detach(), -1))
    inner = sum(terms_of(x.reshape(-1, 72), -1))
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(
        y.detach().float().reshape(-1, 40), inner @ weight.t(), rtol=close, atol=close
    )


def test_a_tensor_without_tokens_has_no_product():
    layer = layer_of("split", torch.float32)
    x = torch.empty(0, 72, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 72) and layer.weight.grad.eq(0).all()


def test_the_noise_is_that_of_the_sum():
    x, weight = operands_at("fprop", torch.float32)
    PROCESS.begin_step(1)
    product_of("fprop", "split", [x, weight])
    noise = {m.operand: m.noise for m in RECORDER.end_step()}
    expected = (x.double() - sum(terms_of(x, -1)).double()).square().sum()
    assert noise["x"] == pytest.approx(float(expected), rel=1e-5)


def test_the_values_of_fprop_may_be_a_sum(options):
    options(
        '[asked]\nfprop = "split"\ndgrad = "mixed"\n[operands]\n'
        '"dgrad.grad" = { quant_type = "none" }\n'
        '"dgrad.weight" = { quant_type = "none", source = "fprop" }\n'
    )
    grad, weight = operands_at("dgrad", torch.float32)
    exact = grad @ sum(terms_of(weight, -1))
    torch.testing.assert_close(product_of("dgrad", "mixed", [grad, weight]), exact)


def test_random_terms_differ_and_depend_on_the_position_alone():
    @quantizer("random", terms=2, stochastic=True)
    def quantize(x, context):
        halves = [round_term(x / 2, "mxfp4", context, rounding="stochastic") for _ in range(2)]
        assert not halves[0][0].equal(halves[1][0])
        return halves

    x = normal(8, 64)
    results = [fake_quantize(x, "random", seed=seed) for seed in (1, 1, 2)]
    assert results[0].equal(results[1]) and not results[0].equal(results[2])


def test_a_scale_is_that_of_all_ranks(monkeypatch):
    monkeypatch.setattr("mqo.quant.gemms.shared_amax", lambda x, operand, shards: x.amax() + 1000)
    operands = gemm_operands("fprop", "split", None)
    operands.product(torch.matmul)
    operands.lhs(normal(4, 64))
    assert operands.alphas.lhs > 1000 / 6 / 448


def declare(**declared):
    @quantizer("wrong", **declared)
    def quantize(x, context):
        return [x / 3] * 3


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        ({"terms": 2}, "returned 3 terms for a tensor; valid: 1 to 2"),
        ({}, "returned 3 terms for a tensor; valid: 1 to 1"),
    ],
)
def test_more_terms_than_declared_are_refused(declared, complaint):
    declare(**declared)
    with pytest.raises(QuantizerError, match=complaint):
        fake_quantize(normal(4, 4), "wrong")


@pytest.mark.parametrize(
    "declared",
    [{"terms": 0}, {"terms": True}, {"terms": 5}, {"terms": 2, "independent_rows": True}],
)
def test_wrong_declarations_are_refused(declared):
    with pytest.raises(ValueError, match="terms"):
        declare(**declared)


@pytest.mark.parametrize("kind", ["nvfp4", "fp8_tensor_e4m3"])
def test_a_term_may_have_the_scale_of_another_amax(kind):
    x, amax = normal(4, 32), torch.tensor(1000.0)

    @quantizer("held", independent_rows=True)
    def quantize(x, context):
        return round_term(x, kind, context, amax=amax)

    values = fake_quantize(x, QuantSpec(kind, without_alpha=True), amax=amax)
    assert fake_quantize(x, "held").equal(values * alpha_of(1000.0, QuantSpec(kind)))
    assert not fake_quantize(x, "held").equal(fake_quantize(x, kind))


@pytest.mark.parametrize(
    ("declared", "body", "complaint"),
    [
        ({}, lambda x, c: c.next_seed(), "stochastic=True"),
        ({"independent_rows": True}, lambda x, c: c.largest(x), "independent_rows"),
        ({}, lambda x, c: round_term(x, "mxfp4", c, rounding="stochastic"), "stochastic=True"),
        ({}, lambda x, c: round_term(x, "split", c), "unknown format 'split'"),
        ({}, lambda x, c: round_term(x, "mxfp4", c, amax=x.max()), "no scale of the tensor"),
    ],
)
def test_undeclared_needs_are_refused(declared, body, complaint):
    quantizer("wrong", **declared)(body)
    with pytest.raises(QuantizerError, match=complaint):
        fake_quantize(normal(4, 4), "wrong")


def test_rows_are_contiguous():
    @quantizer("seen")
    def quantize(x, context):
        assert x.is_contiguous()
        return x.clone()

    x = normal(8, 6, 4)
    for axis in range(3):
        assert fake_quantize(x, QuantSpec("seen"), axis=axis).equal(x)
        assert fake_quantize(x.transpose(0, 2), "seen", axis=axis).equal(x.transpose(0, 2))
