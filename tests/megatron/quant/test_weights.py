"""The cache of quantised weights: when it quantises anew, and that nothing else can be seen."""

import gc

import pytest
import torch
from megatron.quant import (
    QuantSpec,
    cached_bytes,
    gemm_operands,
    operands,
    quantise_dequantise,
    set_step,
    weights,
    weights_changed,
)
from torch.nn import Parameter


@pytest.fixture(autouse=True)
def empty_cache():
    weights.clear()
    yield
    weights.clear()


@pytest.fixture
def quantised(monkeypatch):
    """The tensors that were really quantised, in order."""
    done = []

    def counting(x, *args, **kwargs):
        done.append(x)
        return quantise_dequantise(x, *args, **kwargs)

    monkeypatch.setattr(operands, "quantise_dequantise", counting)
    return done


def weight_of(site, weight, kind="mxfp8"):
    with torch.no_grad():
        return gemm_operands(site, kind, weight).rhs(weight)


def test_a_weight_is_quantised_once_an_epoch_and_axis(options, quantised):
    options("[quantiser]\ncache_weights = true\n")
    weight = Parameter(torch.randn(64, 64))
    for _ in range(3):
        assert weight_of("fprop", weight).equal(quantise_dequantise(weight, QuantSpec("mxfp8")))
        along_n = quantise_dequantise(weight, QuantSpec("mxfp8"), axis=0)
        assert weight_of("dgrad", weight).equal(along_n)
    assert len(quantised) == 2
    assert cached_bytes() == 2 * weight.nbytes


def test_what_autograd_does_not_see_counts_from_the_next_epoch_on(options, quantised):
    options("[quantiser]\ncache_weights = true\n")
    weight = Parameter(torch.randn(4, 64))
    before = weight_of("fprop", weight).clone()
    weights_changed()
    weight.data.mul_(3.1)  # as an optimizer of bf16 weights does
    after = weight_of("fprop", weight)
    assert after.equal(quantise_dequantise(weight, QuantSpec("mxfp8")))
    assert not after.equal(before)
    assert len(quantised) == 2


def test_an_epoch_reuses_the_memory_of_the_one_before(options):
    options("[quantiser]\ncache_weights = true\n")
    weight = Parameter(torch.randn(4, 64))
    first = weight_of("fprop", weight).data_ptr()
    weights_changed()
    assert weight_of("fprop", weight).data_ptr() == first


def test_loading_a_state_dict_is_seen(options):
    options("[quantiser]\ncache_weights = true\n")
    layer = torch.nn.Linear(64, 4, bias=False)
    weight_of("fprop", layer.weight)
    layer.load_state_dict({"weight": torch.randn(4, 64)})
    assert weight_of("fprop", layer.weight).equal(
        quantise_dequantise(layer.weight, QuantSpec("mxfp8"))
    )


def test_stochastic_rounding_draws_anew_in_every_step(options):
    options('[quantiser]\ncache_weights = true\nrounding = "stochastic"\n')
    weight = Parameter(torch.randn(4, 64))
    set_step(1)
    one = weight_of("fprop", weight).clone()
    assert weight_of("fprop", weight).equal(one)
    set_step(2)
    assert not weight_of("fprop", weight).equal(one)
    set_step(0)


def test_types_do_not_share_an_entry(options):
    options("[quantiser]\ncache_weights = true\n")
    weight = Parameter(torch.randn(4, 64))
    for kind in ("mxfp8", "mxfp4", "mxfp8"):
        assert weight_of("fprop", weight, kind).equal(quantise_dequantise(weight, QuantSpec(kind)))


def test_activations_are_not_kept(options, quantised):
    options("[quantiser]\ncache_weights = true\n")
    x = torch.randn(4, 64)
    for _ in range(2):
        gemm_operands("fprop", "mxfp8", None).lhs(x)
    assert len(quantised) == 2
    assert cached_bytes() == 0


def test_without_the_option_nothing_is_kept(quantised):
    weight = Parameter(torch.randn(4, 64))
    weight_of("fprop", weight)
    weight_of("fprop", weight)
    assert len(quantised) == 2
    assert cached_bytes() == 0


def test_a_copy_goes_with_its_weight(options):
    options("[quantiser]\ncache_weights = true\n")
    weight = Parameter(torch.randn(4, 64))
    weight_of("fprop", weight)
    assert cached_bytes()
    del weight
    gc.collect()
    assert cached_bytes() == 0


def test_the_memory_of_an_outdated_copy_is_not_pulled_from_under_a_graph(options):
    options("[quantiser]\ncache_weights = true\n")
    weight = Parameter(torch.randn(4, 64))
    x = torch.randn(2, 64, requires_grad=True)
    y = x @ gemm_operands("fprop", "mxfp8", weight).rhs(weight).t()
    weights_changed()
    weight_of("fprop", weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
