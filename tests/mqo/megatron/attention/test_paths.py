"""The fused path of a layer: its scale, its dropout, what it quantizes."""

import pytest
import torch
from mqo.megatron.attention import paths
from mqo.megatron.attention.fused import fused_attention
from mqo.quant.backend import fake_quantize
from mqo.quant.gemms import gemm_operands
from mqo.quant.record import RECORDER
from mqo.quant.spec import QuantSpec

from .conftest import Layer, Tracker
from .typed import rows


def fused_context(layer, query, key, value, tracker, pv_type="none"):
    qk = gemm_operands("qk", "none", layer)
    return paths.fused_context(layer, pv_type, (), qk, query, key, value, tracker)


def test_the_context_has_the_layers_scale(operands):
    found = fused_context(Layer(), *operands(), Tracker())
    assert torch.equal(found, fused_attention(*operands(), scale=0.25, causal=True))


def test_a_single_query_sees_every_key(operands):
    found = fused_context(Layer(), *operands(sq=1), Tracker())
    assert torch.equal(found, fused_attention(*operands(sq=1), scale=0.25, causal=False))


def test_where_the_probabilities_stay_the_values_are_quantized(operands, options):
    options('[operands]\n"pv.probs" = { quant_type = "none" }\n')
    query, key, value = operands()
    found = fused_context(Layer(), query, key, value, Tracker(), "mxfp4")
    rounded = fake_quantize(value.detach(), QuantSpec("mxfp4"), axis=0)
    assert torch.equal(found, fused_attention(query, key, rounded, scale=0.25, causal=True))


@pytest.mark.parametrize("kind", ["nvfp4", "fp8_tensor_e4m3"])
def test_scales_of_query_and_key_become_a_part_of_the_softmax_scale(operands, kind, monkeypatch):
    query, key, value = operands()
    query = (3e-5 * query).detach().requires_grad_()
    given = []

    def attend(query, key, value, **rest):
        given.append((query, key, rest["scale"]))
        return fused_attention(query, key, value, **rest)

    monkeypatch.setattr(paths, "fused_attention", attend)
    layer, tensors = Layer(), (query, key, value)
    qk = gemm_operands("qk", kind, layer)
    context = paths.fused_context(layer, "none", (), qk, *tensors, Tracker())
    (scaled, _, scale), *_ = given
    assert scaled.bfloat16().float().equal(scaled)
    assert 0.25 / 4 <= scale <= 0.25
    qk = gemm_operands("qk", kind, layer)
    expected = fused_attention(qk.lhs(query), qk.rhs(key), value, scale=0.25, causal=True)
    torch.testing.assert_close(context, expected)
    grad = torch.randn(context.shape, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad(context, tensors, grad)
    for one, other in zip(found, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_a_transform_of_query_and_key_alone_changes_nothing(operands, options):
    options(rows('quant_type = "none", hadamard = 32, signs = "random"'))
    tensors = operands(width=24)
    qk = gemm_operands("qk", "mxfp8", Layer())
    found = paths.fused_context(Layer(), "none", (), qk, *tensors, Tracker())
    expected = fused_attention(*tensors, scale=0.25, causal=True)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    one, other = (torch.autograd.grad(context, tensors, grad) for context in (found, expected))
    torch.testing.assert_close((found, *one), (expected, *other), rtol=1e-5, atol=1e-5)


def test_an_excluded_layer_is_counted(operands, options):
    options('[layers]\nexclude = ["*"]\n')
    found = fused_context(Layer(), *operands(), Tracker(), "mxfp4")
    assert torch.equal(found, fused_attention(*operands(), scale=0.25, causal=True))
    assert {(r.site, r.quant_type, r.calls) for r in RECORDER.entries()} == {("pv", "excluded", 1)}


@pytest.fixture
def dropped(monkeypatch):
    """A kernel that drops out, which the CPU has none of: it drops from the value."""

    def drop(query, key, value, *, dropout, **rest):
        return torch.nn.functional.dropout(value, dropout)

    monkeypatch.setattr(paths, "fused_attention", drop)


def test_dropout_takes_its_numbers_from_the_tracker(operands, dropped):
    layer, tracker = Layer(dropout=0.5), Tracker()
    before = torch.get_rng_state()
    first = fused_context(layer, *operands(), tracker)
    second = fused_context(layer, *operands(), tracker)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert torch.equal(first, fused_context(layer, *operands(), Tracker()))
    assert 0.3 < (first == 0).float().mean() < 0.7


def test_with_sequence_parallelism_it_takes_the_ranks_own(operands, dropped):
    layer, tracker = Layer(dropout=0.5), Tracker()
    layer.config.sequence_parallel = True
    torch.manual_seed(1)
    first = fused_context(layer, *operands(), tracker)
    torch.manual_seed(1)
    assert torch.equal(first, fused_context(layer, *operands(), tracker))
    assert tracker.forks == 0


def test_without_dropout_no_generator_is_touched(operands):
    tracker = Tracker()
    fused_context(Layer(), *operands(), tracker)
    assert tracker.forks == 0
