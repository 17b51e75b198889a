"""The one interface: arguments, `out`, gradients, and which implementation is asked."""

import re
import sys
from types import ModuleType

import pytest
import torch
from megatron.quant import FORMATS, QuantSpec, backend, fake_quantize, reference

QUANTIZED_TYPES = tuple(FORMATS)
MXFP8 = QuantSpec("mxfp8")
STOCHASTIC = QuantSpec("mxfp8", rounding="stochastic")
every_type = pytest.mark.parametrize("kind", QUANTIZED_TYPES)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)
    backend._load.cache_clear()
    yield
    backend._load.cache_clear()


@pytest.fixture
def implementation(monkeypatch):
    """A function that puts a `qdq` in the place of a named implementation."""

    def install(name, qdq):
        module = ModuleType(name)
        module.qdq = qdq
        monkeypatch.setitem(sys.modules, f"megatron.quant.{backend.MODULES[name]}", module)
        backend._load.cache_clear()

    return install


@pytest.fixture
def missing(monkeypatch):
    """A function that makes a named implementation one that cannot be imported."""

    def remove(name):
        monkeypatch.setitem(sys.modules, f"megatron.quant.{backend.MODULES[name]}", None)
        backend._load.cache_clear()

    return remove


# -- arguments and result ----------------------------------------------------------------------


@every_type
def test_the_result_is_the_references(assert_same_bits, kind):
    x, spec = normal(5, 70), QuantSpec(kind)
    assert_same_bits(fake_quantize(x, spec, axis=0), reference.qdq(x, spec, 0))


@every_type
def test_the_result_carries_no_gradient(kind):
    x = normal(4, 32).requires_grad_()
    assert not fake_quantize(x, QuantSpec(kind)).requires_grad


def test_none_returns_the_very_same_object():
    for x in (normal(3, 5), torch.arange(4)):
        assert fake_quantize(x, QuantSpec("none")) is x


def test_none_fills_what_it_is_given():
    x, out = normal(3, 5), torch.empty(3, 5)
    assert fake_quantize(x, QuantSpec("none"), out=out) is out
    assert out.equal(x)


@every_type
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64])
def test_other_dtypes_are_refused(kind, dtype):
    valid = re.escape("valid: torch.float32, torch.bfloat16, torch.float16")
    with pytest.raises(TypeError, match=valid):
        fake_quantize(torch.zeros(4, dtype=dtype), QuantSpec(kind))


@every_type
@pytest.mark.parametrize("axis", [2, -3, 0.0])
def test_an_axis_that_is_not_there_is_refused(kind, axis):
    with pytest.raises(ValueError, match=rf"axis {axis}; valid: -2, -1, 0, 1"):
        fake_quantize(torch.zeros(4, 4), QuantSpec(kind), axis=axis)


def test_a_scalar_has_no_axis_for_blocks():
    with pytest.raises(ValueError, match="axis -1"):
        fake_quantize(torch.tensor(1.0), MXFP8)
    assert fake_quantize(torch.tensor(1.06), QuantSpec("hifp8")) == 1.0


@pytest.mark.parametrize("seed", [None, -1, 2**64, 1.0, True])
def test_stochastic_rounding_demands_a_seed(seed):
    with pytest.raises(ValueError, match=re.escape(f"{seed!r} is no seed; valid: 0 to 2^64 - 1")):
        fake_quantize(normal(4, 4), STOCHASTIC, seed=seed)


def test_other_roundings_do_not_look_at_the_seed():
    x = normal(4, 64)
    assert fake_quantize(x, MXFP8, seed=3).equal(fake_quantize(x, MXFP8))


@every_type
def test_out_is_written_and_returned_whatever_its_strides(assert_same_bits, kind):
    x, out = normal(36, 70), torch.empty(70, 36).t()
    expected = fake_quantize(x, QuantSpec(kind), axis=0)
    assert fake_quantize(x, QuantSpec(kind), axis=0, out=out) is out
    assert_same_bits(out, expected)


@every_type
@pytest.mark.parametrize("axis", [0, 1])
def test_out_may_be_the_tensor_itself(assert_same_bits, kind, axis):
    x = normal(36, 70, dtype=torch.bfloat16)
    expected = fake_quantize(x, QuantSpec(kind), axis=axis)
    assert fake_quantize(x, QuantSpec(kind), axis=axis, out=x) is x
    assert_same_bits(x, expected)


@pytest.mark.parametrize(
    "out", [torch.empty(4), torch.empty(2, 32).half(), torch.empty(2, 32, device="meta")]
)
def test_an_unlike_out_is_refused(out):
    text = re.escape("valid: [2, 32] torch.float32 on cpu, as x")
    with pytest.raises(ValueError, match=text):
        fake_quantize(torch.zeros(2, 32), MXFP8, out=out)


# -- which implementation ----------------------------------------------------------------------


def test_the_one_made_for_the_device_gets_the_arguments_as_they_are(implementation):
    seen = []
    implementation("cpu", lambda *arguments: seen.append(arguments) or arguments[3])
    x, out, amax = normal(4, 32), torch.empty(4, 32), torch.tensor(8.0)
    assert fake_quantize(x, STOCHASTIC, axis=-2, out=out, seed=7, amax=amax) is out
    assert seen == [(x, STOCHASTIC, -2, out, 7, amax)]


def test_what_it_does_not_support_the_reference_does(implementation):
    implementation("cpu", lambda *arguments: None)
    x = normal(4, 32)
    assert fake_quantize(x, MXFP8).equal(reference.qdq(x, MXFP8))


def test_one_that_cannot_be_imported_is_passed_over(missing):
    missing("cpu")
    x = normal(4, 32)
    assert fake_quantize(x, MXFP8).equal(reference.qdq(x, MXFP8))


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_the_environment_chooses(implementation, monkeypatch, name):
    implementation(name, lambda x, *_: torch.full_like(x, 5.0))
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, name)
    assert fake_quantize(normal(4, 32), MXFP8).eq(5).all()
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "reference")
    assert not fake_quantize(normal(4, 32), MXFP8).eq(5).any()


def test_an_unknown_choice_is_refused_and_the_valid_ones_named(monkeypatch):
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "numba")
    text = "unknown MQO_QUANT_BACKEND 'numba'; valid: reference, cpu, triton"
    with pytest.raises(ValueError, match=text):
        fake_quantize(normal(4, 32), MXFP8)


def test_a_choice_that_cannot_be_imported_is_an_error(missing, monkeypatch):
    missing("triton")
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    with pytest.raises(RuntimeError, match="MQO_QUANT_BACKEND=triton, but that cannot be imported"):
        fake_quantize(normal(4, 32), MXFP8)
