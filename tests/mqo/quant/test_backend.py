"""The one interface: arguments, `out`, gradients, and which implementation is asked."""

import re
import sys
import warnings
from types import ModuleType

import pytest
import torch
from mqo.quant import backend, reference
from mqo.quant.backend import fake_quantize
from mqo.quant.spec import QuantSpec
from torch._subclasses.fake_tensor import FakeTensorMode

from .tensors import every_kind, normal

pytestmark = pytest.mark.usefixtures("no_choice")
MXFP8 = QuantSpec("mxfp8")
STOCHASTIC = QuantSpec("mxfp8", rounding="stochastic")


@pytest.fixture
def implementation(monkeypatch):
    """A function that puts a `qdq` in the place of a named implementation."""

    def install(name, qdq):
        module = ModuleType(name)
        module.qdq = qdq
        monkeypatch.setitem(sys.modules, f"mqo.quant.{backend.MODULES[name]}", module)
        backend._load.cache_clear()

    return install


@pytest.fixture
def missing(monkeypatch):
    """A function that makes a named implementation one that cannot be imported."""

    def remove(name):
        monkeypatch.setitem(sys.modules, f"mqo.quant.{backend.MODULES[name]}", None)
        backend._load.cache_clear()

    return remove


# -- arguments and result ----------------------------------------------------------------------


@every_kind
def test_the_result_is_the_references(assert_same_bits, kind):
    x, spec = normal(5, 70), QuantSpec(kind)
    assert_same_bits(fake_quantize(x, spec, axis=0), reference.qdq(x, spec, 0))


@every_kind
def test_the_result_has_the_gradient_of_the_tensor_unless_told_otherwise(kind):
    weight, upstream = torch.nn.Parameter(100 * normal(4, 32)), normal(4, 32, seed=1)
    result = fake_quantize(weight, kind)
    assert type(result) is torch.Tensor
    assert result.equal(fake_quantize(weight.detach(), QuantSpec(kind)))
    result.backward(upstream)
    assert weight.grad.equal(upstream)
    assert not fake_quantize(weight, kind, has_gradient=False).requires_grad
    with torch.no_grad():
        assert not fake_quantize(weight, kind).requires_grad
    assert not fake_quantize(weight, kind, out=torch.empty(4, 32)).requires_grad


def test_a_compiled_graph_has_the_same_values_and_gradients():
    x = normal(4, 64).requires_grad_()
    compiled = torch.compile(
        lambda x: 2 * fake_quantize(x, "nvfp4"), backend="aot_eager", fullgraph=True
    )
    y = compiled(x)
    assert y.equal(2 * fake_quantize(x, "nvfp4"))
    y.sum().backward()
    assert x.grad.eq(2).all()


def test_a_name_of_no_format_is_refused():
    with pytest.raises(ValueError, match="'mxfp9'; valid: none, mxfp8"):
        fake_quantize(normal(4, 32), "mxfp9")


def test_none_returns_the_very_same_object_or_fills_what_it_is_given():
    for x in (torch.arange(4), normal(3, 5)):
        assert fake_quantize(x, QuantSpec("none")) is x
    out = torch.empty(3, 5)
    assert fake_quantize(x, QuantSpec("none"), out=out) is out
    assert out.equal(x)


@every_kind
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64])
def test_other_dtypes_are_refused(kind, dtype):
    valid = re.escape("valid: torch.float32, torch.bfloat16, torch.float16")
    with pytest.raises(TypeError, match=valid):
        fake_quantize(torch.zeros(4, dtype=dtype), QuantSpec(kind))


@every_kind
@pytest.mark.parametrize("axis", [2, -3, 0.0])
def test_an_axis_that_is_not_there_is_refused(kind, axis):
    with pytest.raises(ValueError, match=rf"axis {axis}; valid: -2, -1, 0, 1"):
        fake_quantize(torch.zeros(4, 4), QuantSpec(kind), axis=axis)


def test_a_scalar_has_no_axis_for_blocks():
    for kind in ("mxfp8", "hif4"):
        with pytest.raises(ValueError, match=f"{kind} .* 0-d tensor"):
            fake_quantize(torch.tensor(1.0), QuantSpec(kind))
    assert fake_quantize(torch.tensor(1.06), QuantSpec("hifp8")) == 1.0


@pytest.mark.parametrize("seed", [None, -1, 2**64, 1.0, True])
def test_stochastic_rounding_demands_a_seed(seed):
    with pytest.raises(ValueError, match=re.escape(f"seed {seed!r}; valid: ")):
        fake_quantize(normal(4, 4), STOCHASTIC, seed=seed)


def test_other_roundings_do_not_look_at_the_seed():
    x = normal(4, 64)
    assert fake_quantize(x, MXFP8, seed=3).equal(fake_quantize(x, MXFP8))


@every_kind
def test_out_is_written_and_returned_whatever_its_strides(assert_same_bits, kind):
    x, out = normal(36, 70), torch.empty(70, 36).t()
    expected = fake_quantize(x, QuantSpec(kind), axis=0)
    assert fake_quantize(x, QuantSpec(kind), axis=0, out=out) is out
    assert_same_bits(out, expected)


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
    x, out, amax = normal(4, 32), torch.empty(4, 32), torch.tensor(9.0)
    assert fake_quantize(x, STOCHASTIC, axis=-2, out=out, seed=7, amax=amax) is out
    assert seen == [(x, STOCHASTIC, -2, out, 7, amax)]


def test_what_it_does_not_support_the_reference_does(implementation):
    implementation("cpu", lambda *arguments: None)
    x = normal(4, 32)
    assert fake_quantize(x, MXFP8).equal(reference.qdq(x, MXFP8))


def test_the_reference_is_used_where_the_kernels_are_missing_and_said_once(missing):
    missing("cpu")
    x = normal(4, 32)
    with pytest.warns(UserWarning, match="numba"):
        assert fake_quantize(x, MXFP8).equal(reference.qdq(x, MXFP8))
    with warnings.catch_warnings(action="error"):
        fake_quantize(x, MXFP8)


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
    with pytest.raises(RuntimeError, match="MQO_QUANT_BACKEND=triton"):
        fake_quantize(normal(4, 32), MXFP8)


# -- operators -----------------------------------------------------------------------------------


SPECS = (
    QuantSpec("mxfp8", scale_rule="ceil", block=16),
    QuantSpec("nvfp4", rounding="stochastic", tile="square"),
    QuantSpec("hifp8", overflow="inf", tensor_scale=True),
)
every_spec = pytest.mark.parametrize("spec", SPECS)
SEED = 2**64 - 3


def transposed():
    return normal(70, 36).t()


def test_the_operators_keep_torchs_rules():
    x, arguments = transposed(), (torch.tensor(4.0), 0, -3, *backend.fields_of(SPECS[1]))
    torch.library.opcheck(torch.ops.megatron_quant.fake_quantize, (x, *arguments))
    out = torch.empty_like(x)
    torch.library.opcheck(torch.ops.megatron_quant.fake_quantize_out, (x, out, *arguments))


@every_spec
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiled_function_gives_the_same_bits(assert_same_bits, spec, compiler):
    def function(x, amax):
        doubled = x * 2
        rounded = fake_quantize(doubled, spec, axis=0, seed=SEED, amax=amax)
        return rounded + 1, fake_quantize(doubled, spec, axis=0, seed=SEED, out=doubled)

    x, amax = transposed(), torch.tensor(9.0)
    torch.compiler.reset()
    given, own = torch.compile(function, backend=compiler, fullgraph=True)(x, amax)
    assert_same_bits(given, reference.qdq(x * 2, spec, 0, seed=SEED, amax=amax) + 1)
    assert_same_bits(own, reference.qdq(x * 2, spec, 0, seed=SEED))


@every_kind
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_tell_shape_dtype_strides_and_device(kind, device):
    spec = QuantSpec(kind, rounding="stochastic")
    with FakeTensorMode():
        x = torch.empty(70, 36, dtype=torch.bfloat16, device=device).t()
    # Within the mode and without, new and in place.
    results = [fake_quantize(x, spec, axis=0, seed=1), fake_quantize(x, spec, seed=1, out=x)]
    meta = torch.empty(70, 36, dtype=torch.bfloat16, device="meta").t()  # not a fake tensor
    with FakeTensorMode() as mode:
        results.append(fake_quantize(mode.from_tensor(transposed()).bfloat16(), spec, seed=1))
    results.append(fake_quantize(meta, spec, axis=0, seed=1))
    for result, place in zip(results, (device, device, "cpu", "meta"), strict=True):
        assert (result.shape, result.stride(), result.dtype) == (x.shape, x.stride(), x.dtype)
        assert result.device.type == place
    assert results[1] is x
    assert fake_quantize(meta, spec, seed=1, out=meta) is meta


def test_autograd_sees_that_out_was_written():
    x, out = transposed(), transposed()
    before = out._version
    torch.ops.megatron_quant.fake_quantize_out(x, out, None, 0, 0, *backend.fields_of(SPECS[0]))
    assert out._version > before
