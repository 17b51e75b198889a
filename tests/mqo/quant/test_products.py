"""Products with alphas: equal to an exact model, in every form, with gradients."""

import types

import pytest
import torch
from mqo.quant import products
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS
from mqo.quant.gemms import gemm_operands
from mqo.quant.products import Alphas, with_alphas
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER
from mqo.quant.spec import QuantSpec

KINDS = ("nvfp4", "fp8_tensor_e4m3", "fp8_tensor_e5m2", "fp8_tensor")
every_kind = pytest.mark.parametrize("kind", KINDS)
# Site: the shapes of both operands, and what makes of them the operands of a product.
SITES = {
    "fprop": ((48, 128), (40, 128), lambda x, w: (x, w.t())),
    "dgrad": ((48, 128), (128, 40), lambda grad, w: (grad, w)),
    "wgrad": ((128, 48), (128, 40), lambda grad, x: (grad.t(), x)),
    "qk": ((40, 6, 128), (48, 6, 128), lambda q, k: (q.transpose(0, 1), k.permute(1, 2, 0))),
    "pv": ((6, 40, 128), (128, 6, 32), lambda p, v: (p, v.transpose(0, 1))),
}
every_site = pytest.mark.parametrize("site", SITES)
SCALE = 0.3
only_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(site, dtype):
    """The operands of a site; one is so small that its values in float16 are subnormal."""
    lhs, rhs, _ = SITES[site]
    return normal(*lhs, scale=1e-6).to(dtype), normal(*rhs, seed=1, scale=100).to(dtype)


def product_of(site, operands, tensors):
    """The product as the patched source computes it."""
    order = SITES[site][2]
    if site == "qk":
        multiply = operands.product(torch.baddbmm)
        pair = order(operands.lhs(tensors[0]), operands.rhs(tensors[1]))
        unread = pair[0].new_full((6, 40, 48), torch.nan)
        return multiply(unread, *pair, beta=0.0, alpha=SCALE)
    multiply = operands.product(torch.bmm if site == "pv" else torch.matmul)
    return multiply(*order(operands.lhs(tensors[0]), operands.rhs(tensors[1])))


def exact(site, kind, tensors):
    """The product of the values, in float64."""
    operands = gemm_operands(site, kind, None)
    alphas = operands.separate_alphas()
    pair = SITES[site][2](operands.lhs(tensors[0]), operands.rhs(tensors[1]))
    left, right = (operand.double() for operand in pair)
    return left @ right * alphas.both * (SCALE if site == "qk" else 1.0)


@every_site
@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=only_cuda)])
def test_a_product_is_rounded_once(site, kind, dtype, device):
    tensors = [tensor.to(device) for tensor in drawn(site, dtype)]
    result = product_of(site, gemm_operands(site, kind, None), tensors)
    assert result.dtype == dtype
    # Sums in float32 that are close to a tie differ.
    assert (result == exact(site, kind, tensors).to(dtype)).double().mean() > 0.999


@every_site
@every_kind
def test_in_float32_a_product_is_as_exact_as_torchs(site, kind):
    tensors = drawn(site, torch.float32)
    result = product_of(site, gemm_operands(site, kind, None), tensors).double()
    expected = exact(site, kind, tensors)
    assert (result - expected).norm() < 1e-6 * expected.norm()


@every_site
@pytest.mark.parametrize("kind", ["none", "mxfp8", "hif4", "fp8_block_fp32"])
def test_without_a_tensors_scale_torch_multiplies(site, kind):
    tensors = drawn(site, torch.float32)
    operands = gemm_operands(site, kind, None)
    left, right = SITES[site][2](operands.lhs(tensors[0]), operands.rhs(tensors[1]))
    if site == "qk":
        expected = torch.baddbmm(left.new_empty(()), left, right, beta=0.0, alpha=SCALE)
    else:
        expected = left @ right
    assert product_of(site, gemm_operands(site, kind, None), tensors).equal(expected)


@every_site
@every_kind
def test_operands_of_another_function_include_alpha(site, kind):
    spec_of = {"fp8_tensor": "fp8_tensor_e5m2" if site in ("dgrad", "wgrad") else "fp8_tensor_e4m3"}
    lhs, _ = drawn(site, torch.float32)
    operands = gemm_operands(site, kind, None)
    assert operands.product(torch.einsum) is torch.einsum
    axis = operands.site.lhs_axis
    expected = fake_quantize(lhs, QuantSpec(spec_of.get(kind, kind)), axis=axis)
    assert operands.lhs(lhs).equal(expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_operand_without_alpha_is_exact_in_bfloat16(kind):
    if FORMATS[kind].scale == "fp32":  # a scale of each block stays in the operand
        return
    for tensor_scale in (False, True):
        spec = QuantSpec(kind, tensor_scale=tensor_scale, without_alpha=True)
        scaled = fake_quantize(normal(64, 128, scale=3e-5), spec)
        assert scaled.bfloat16().float().equal(scaled)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["qk", "pv"])
@every_kind
def test_gradients_of_attentions_products_are_those_of_values(site, kind):
    tensors = [t.requires_grad_() for t in drawn(site, torch.float32)]
    result = product_of(site, gemm_operands(site, kind, None), tensors)
    grad = normal(*result.shape, seed=2)
    got = torch.autograd.grad(result, tensors, grad)
    operands = gemm_operands(site, kind, None)
    values = operands.lhs(tensors[0]), operands.rhs(tensors[1])
    expected = SITES[site][2](*values)
    expected = (expected[0] @ expected[1]) * (SCALE if site == "qk" else 1.0)
    for one, other in zip(got, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


# -- forms of wgrad --------------------------------------------------------------------------------


def wgrad_gemm_accum_fp32(x, grad, main_grad):
    raise AssertionError("it has no alpha")


wgrad_gemm_accum_fp16 = types.FunctionType(
    wgrad_gemm_accum_fp32.__code__, globals(), "wgrad_gemm_accum_fp16"
)
te_general_gemm = types.FunctionType(wgrad_gemm_accum_fp32.__code__, globals(), "te_general_gemm")


@pytest.mark.parametrize("function", [wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16])
@pytest.mark.parametrize("wide", [False, True])
def test_fused_accumulation_is_split(function, wide):
    grad, x = (normal(64, 16, seed=s).bfloat16() for s in range(2))
    main_grad = normal(16, 16, seed=3).to(torch.float32 if wide else torch.bfloat16)
    expected = main_grad.double() + 0.125 * grad.double().t() @ x.double()
    with_alphas(function, Alphas(0.25, 0.5))(x, grad, main_grad)
    tolerance = 1e-6 if wide else 2**-8
    assert ((main_grad - expected).abs() <= tolerance * (1 + expected.abs())).all()


def test_the_main_gradient_is_overwritten_where_the_engine_would():
    grad, x = (normal(64, 16, seed=s).bfloat16() for s in range(2))
    main_grad = torch.full((16, 16), torch.nan)
    gemm = with_alphas(te_general_gemm, Alphas(0.25, 0.5))
    gemm(x, grad, out_dtype=torch.float32, layout="NT", out=main_grad, grad=True)
    torch.testing.assert_close(main_grad, 0.125 * grad.float().t() @ x.float())


def test_a_given_result_is_written():
    left, right, out = normal(8, 16), normal(16, 8, seed=1), torch.empty(8, 8)
    assert with_alphas(torch.matmul, Alphas(2.0, 0.5))(left, right, out=out).equal(left @ right)
    scaled = with_alphas(torch.matmul, Alphas(2.0, 1.0))(left, right, out=out)
    torch.testing.assert_close(scaled, 2 * left @ right)
    torch.testing.assert_close(out, scaled)


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_other_devices_multiply_in_the_dtype_of_the_operands(shape):
    left = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    right = torch.empty(8, 5, dtype=torch.bfloat16, device="meta")
    product = products.matmul(left, right, 0.5)
    assert (product.shape, product.dtype) == ((*shape[:-1], 5), torch.bfloat16)
    batch = products.bmm(left.view(-1, 3, 8), right.expand(2, 8, 5), 0.5)
    assert (batch.shape, batch.dtype) == ((2, 3, 5), torch.bfloat16)


def test_other_devices_accumulate_in_float32_without_copies_of_the_operands():
    grad, x = (torch.empty(8, 4, dtype=torch.bfloat16, device="meta") for _ in range(2))
    main_grad = torch.empty(4, 4, device="meta")
    with_alphas(wgrad_gemm_accum_fp32, Alphas(0.5))(x, grad, main_grad)
    assert products._wide(grad.t(), x).dtype == torch.float32


# -- what reads operands ---------------------------------------------------------------------------


@every_kind
def test_the_records_are_those_of_values(kind):
    x = normal(64, 128, scale=1e-6)

    def measured(prepare):
        operands = gemm_operands("fprop", kind, None)
        prepare(operands)
        PROCESS.begin_step(1)
        operands.lhs(x)
        (measurement,) = RECORDER.end_step()
        return measurement

    apart = measured(lambda operands: operands.separate_alphas())
    whole = measured(lambda operands: None)
    assert apart.sqnr_db == pytest.approx(whole.sqnr_db, abs=1e-3)
    assert (apart.scales, apart.amax, apart.saturated) == (
        *(whole.scales, whole.amax, whole.saturated),
    )


@every_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_amax_that_is_not_finite_makes_the_product_nan(kind, bad):
    x, weight = normal(4, 64), normal(8, 64, seed=1)
    x[2, 3] = bad
    operands = gemm_operands("fprop", kind, None)
    multiply = operands.product(torch.matmul)
    assert multiply(operands.lhs(x), operands.rhs(weight).t()).isnan().all()
