"""The cache of quantized weights: when it quantizes anew, and that nothing else can be seen."""

import gc

import pytest
import torch
from mqo.quant import gemms, weights
from mqo.quant.backend import fake_quantize
from mqo.quant.gemms import gemm_operands
from mqo.quant.progress import set_step
from mqo.quant.spec import QuantSpec
from mqo.quant.weights import weights_changed
from torch.nn import Parameter

from .cached_weights import cached_bytes


@pytest.fixture(autouse=True)
def empty_cache(options):
    """The copies of weights are kept, and none is there."""
    options("[quantizer]\ncache_weights = true\n")
    weights.clear()
    yield
    weights.clear()


@pytest.fixture
def quantized(monkeypatch):
    """The tensors that were really quantized, in order."""
    done = []

    def counting(x, *args, **kwargs):
        done.append(x)
        return fake_quantize(x, *args, **kwargs)

    monkeypatch.setattr(gemms, "fake_quantize", counting)
    return done


def weight_of(site, weight, kind="mxfp8"):
    with torch.no_grad():
        return gemm_operands(site, kind, weight).rhs(weight)


def test_a_weight_is_quantized_once_an_epoch_and_axis(quantized):
    weight = Parameter(torch.randn(64, 64))
    for _ in range(3):
        assert weight_of("fprop", weight).equal(fake_quantize(weight, QuantSpec("mxfp8")))
        along_n = fake_quantize(weight, QuantSpec("mxfp8"), axis=0)
        assert weight_of("dgrad", weight).equal(along_n)
    assert len(quantized) == 2
    assert cached_bytes() == 2 * weight.nbytes


def test_what_autograd_does_not_see_counts_from_the_next_epoch_on(quantized):
    weight = Parameter(torch.randn(4, 64))
    before = weight_of("fprop", weight).clone()
    weights_changed()
    weight.data.mul_(3.1)  # as an optimizer of bf16 weights does
    after = weight_of("fprop", weight)
    assert after.equal(fake_quantize(weight, QuantSpec("mxfp8")))
    assert not after.equal(before)
    assert len(quantized) == 2


def test_an_epoch_reuses_the_memory_of_the_one_before():
    weight = Parameter(torch.randn(4, 64))
    first = weight_of("fprop", weight).data_ptr()
    weights_changed()
    assert weight_of("fprop", weight).data_ptr() == first


def test_loading_a_state_dict_is_seen():
    layer = torch.nn.Linear(64, 4, bias=False)
    weight_of("fprop", layer.weight)
    layer.load_state_dict({"weight": torch.randn(4, 64)})
    assert weight_of("fprop", layer.weight).equal(fake_quantize(layer.weight, QuantSpec("mxfp8")))


def test_stochastic_rounding_draws_anew_in_every_step(options):
    options('[quantizer]\ncache_weights = true\nrounding = "stochastic"\n')
    weight = Parameter(torch.randn(4, 64))
    set_step(1)
    one = weight_of("fprop", weight).clone()
    assert weight_of("fprop", weight).equal(one)
    set_step(2)
    assert not weight_of("fprop", weight).equal(one)


def test_types_do_not_share_an_entry():
    weight = Parameter(torch.randn(4, 64))
    for kind in ("mxfp8", "mxfp4", "mxfp8"):
        assert weight_of("fprop", weight, kind).equal(fake_quantize(weight, QuantSpec(kind)))


def test_activations_are_not_kept(quantized):
    x = torch.randn(4, 64)
    for _ in range(2):
        gemm_operands("fprop", "mxfp8", None).lhs(x)
    assert len(quantized) == 2
    assert cached_bytes() == 0


def test_without_the_option_nothing_is_kept(options, quantized):
    options("")
    weight = Parameter(torch.randn(4, 64))
    weight_of("fprop", weight)
    weight_of("fprop", weight)
    assert len(quantized) == 2
    assert cached_bytes() == 0


def test_a_copy_goes_with_its_weight():
    weight = Parameter(torch.randn(4, 64))
    weight_of("fprop", weight)
    assert cached_bytes()
    del weight
    gc.collect()
    assert cached_bytes() == 0


def test_the_memory_of_an_outdated_copy_is_not_pulled_from_under_a_graph():
    weight = Parameter(torch.randn(4, 64))
    x = torch.randn(2, 64, requires_grad=True)
    y = x @ gemm_operands("fprop", "mxfp8", weight).rhs(weight).t()
    weights_changed()
    weight_of("fprop", weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- what neither epochs of ours nor versions show ---------------------------------------------


def fused_step(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True).step()


def assigned(layer):
    layer.weight.data = torch.randn(4, 64)


def assigned_within_a_buffer(layer):
    """As a buffer of parameters that is laid out anew: the same storage, another place."""
    layer.weight.data = layer.buffer[256:].view(4, 64)


def from_vector(layer):
    torch.nn.utils.vector_to_parameters(torch.randn(256), layer.parameters())


@pytest.mark.parametrize("change", [fused_step, assigned, assigned_within_a_buffer, from_vector])
def test_a_change_that_leaves_the_version_is_seen(change):
    layer = torch.nn.Linear(64, 4, bias=False)
    layer.buffer = torch.randn(512)
    layer.weight.data = layer.buffer[:256].view(4, 64)
    before, version = weight_of("fprop", layer.weight).clone(), layer.weight._version
    change(layer)
    assert layer.weight._version == version
    after = weight_of("fprop", layer.weight)
    assert after.equal(fake_quantize(layer.weight, QuantSpec("mxfp8")))
    assert not after.equal(before)


def test_new_memory_at_the_address_of_the_old_is_seen():
    weight = Parameter(torch.randn(4, 64))
    memory = torch.randn(4, 64).numpy()
    weight.data = torch.from_numpy(memory)
    address = weight.data_ptr()
    weight_of("fprop", weight)
    weight.data = torch.empty(0)  # the old storage is gone, as of weights that are offloaded
    memory[:] = 3.1
    weight.data = torch.from_numpy(memory)
    assert weight.data_ptr() == address
    assert weight_of("fprop", weight).equal(fake_quantize(weight, QuantSpec("mxfp8")))


def test_parameters_that_are_gathered_behind_the_step_are_quantized_as_they_arrive(
    equal_on_two_ranks,
):
    equal_on_two_ranks("gathered_weights.py")
