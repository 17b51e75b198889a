"""The random Hadamard transform: its definition, what it keeps of a GEMM, and who computes it."""

import re
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant import backend, hadamard, tensor_amax
from mqo.quant.formats import HADAMARD_POINTS, HADAMARD_SIGNS
from mqo.quant.hadamard import signs_of, transform
from mqo.quant.spec import Hadamard
from mqo.quant.strides import is_dense, memory_order
from torch._subclasses.fake_tensor import FakeTensorMode

from .conftest import forget_implementations
from .tensors import DTYPES, every_dtype, every_size, hadamards, normal

pytestmark = pytest.mark.usefixtures("no_choice")
SEED = 2**64 - 3
every_sign = pytest.mark.parametrize("signs", HADAMARD_SIGNS)


def whole(*shape, seed=0):
    """Whole numbers, of which float32 holds all sums."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 100, shape, generator=generator).float()


def sylvester(points):
    """The matrix, from the formula for its elements: float64."""
    i = torch.arange(points)
    odd = torch.tensor([[(int(a) & int(b)).bit_count() % 2 for a in i] for b in i])
    return 1.0 - 2.0 * odd.double()


@pytest.fixture(params=["cpu", "reference"])
def chosen(request, monkeypatch):
    """Each implementation that a CPU has."""
    if request.param == "cpu":
        pytest.importorskip("numba")
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, request.param)


# -- the definition ----------------------------------------------------------------------------


@pytest.mark.usefixtures("chosen")
@every_size
@every_sign
def test_it_is_the_product_with_signs_and_sylvesters_matrix(points, signs):
    # Sums of whole numbers are exact, so the factor's rounding is the only one.
    how = Hadamard(points, signs)
    x = whole(5, 3 * points)
    sums = (x.unflatten(1, (3, points)) * signs_of(how, SEED)).double() @ sylvester(points)
    factor = torch.tensor(1.0 / points**0.5).float().double()
    expected = (sums * factor).flatten(1).float()
    assert transform(x, how, seed=SEED).equal(expected)


@pytest.mark.usefixtures("chosen")
@every_size
@every_sign
@pytest.mark.parametrize("size", [1, 16, 100, 128, 131, 300])
def test_the_product_of_two_transformed_operands_is_the_plain_one(points, signs, size):
    how = Hadamard(points, signs)
    a, b = whole(7, size), whole(size, 9, seed=1)
    left = transform(a, how, seed=SEED).double()
    right = transform(b, how, axis=0, seed=SEED).double()
    assert left.shape == (7, -(-size // points) * points)
    assert right.shape == (left.shape[1], 9)
    expected = a.double() @ b.double()
    if points in (16, 64):  # their factors are powers of two
        assert (left @ right).equal(expected)
    else:
        # Each element is rounded twice: its factor, and its product with it.
        bound = 4 * 2.0**-24 * left.abs() @ right.abs()
        assert ((left @ right - expected).abs() <= bound).all()


def test_the_fixed_signs_are_the_published_ones():
    published = "+++-+------+-+--"
    for points in HADAMARD_POINTS:
        signs = signs_of(Hadamard(points))
        assert "".join("+" if s > 0 else "-" for s in signs) == published * (points // 16)


def test_random_signs_are_as_often_negative_as_positive():
    drawn = torch.stack([signs_of(Hadamard(128, "random"), seed) for seed in range(200)])
    assert drawn.abs().eq(1).all()
    assert abs(drawn.mean()) < 4 / drawn.numel() ** 0.5  # 4 sigma
    assert drawn.mean(0).abs().max() < 5 / 200**0.5


# -- arguments and result ----------------------------------------------------------------------


@pytest.mark.usefixtures("chosen")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    hadamards,
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.data(),
    st.sampled_from(DTYPES),
)
def test_shape_dtype_and_order_in_memory(how, shape, data, dtype):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    order = data.draw(st.permutations(range(len(shape))))
    x = normal(*shape, dtype=dtype).permute(order)
    result = transform(x, how, axis=axis, seed=1)
    expected = list(x.shape)
    expected[axis] = -(-expected[axis] // how.points) * how.points
    assert list(result.shape) == expected
    assert result.dtype == dtype
    assert is_dense(result)
    assert not x.is_contiguous() or result.is_contiguous()
    if min(shape) > 1:  # an axis of one element may be anywhere
        assert memory_order(result) == memory_order(x)


@pytest.mark.usefixtures("chosen")
@every_dtype
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layout", ["same", "turned", "gaps", "itself"])
def test_out_is_written_and_returned_whatever_its_strides(assert_same_bits, dtype, axis, layout):
    x, how = normal(64, 96, dtype=dtype), Hadamard(16)
    frame = torch.full((70, 200), 7.0, dtype=dtype)
    out = {
        "same": torch.empty_like(x),
        "turned": torch.empty(96, 64, dtype=dtype).T,
        "gaps": frame[3:67, 4:196:2],
        "itself": x,
    }[layout]
    expected = hadamard.reference(x, how, axis, None)
    assert transform(x, how, axis=axis, out=out) is out
    assert_same_bits(out, expected)
    if layout == "gaps":
        out.fill_(7.0)
        assert frame.eq(7).all()


@pytest.mark.usefixtures("chosen")
@every_dtype
@pytest.mark.parametrize("axis", [0, 1])
def test_amax_becomes_the_largest_magnitude(dtype, axis):
    for x in (normal(70, 90), torch.zeros(3, 4), torch.full((2, 2), torch.nan), torch.empty(0, 3)):
        amax = torch.tensor(-1.0)
        result = transform(x.to(dtype), Hadamard(32), axis=axis, amax=amax)
        expected = tensor_amax.largest(result)
        assert amax.equal(expected) or (amax.isnan() and expected.isnan())


@pytest.mark.usefixtures("chosen")
def test_the_result_carries_no_gradient():
    x = torch.nn.Parameter(normal(4, 32))
    result = transform(x, Hadamard(16))
    assert type(result) is torch.Tensor
    assert not result.requires_grad


@pytest.mark.usefixtures("chosen")
def test_autograd_notices_what_is_written_into_out():
    saved = normal(4, 32)
    loss = (saved * normal(4, 32).requires_grad_()).sum()
    transform(normal(4, 32), Hadamard(16), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_other_dtypes_are_refused(dtype):
    valid = re.escape("valid: torch.float32, torch.bfloat16, torch.float16")
    with pytest.raises(TypeError, match=valid):
        transform(torch.zeros(4, 16, dtype=dtype), Hadamard(16))


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="axis 2; valid: -2, -1, 0, 1"):
        transform(normal(4, 16), Hadamard(16), axis=2)
    with pytest.raises(ValueError, match="0-d tensor"):
        transform(torch.tensor(1.0), Hadamard(16))


@pytest.mark.parametrize("seed", [None, -1, 2**64, 1.0])
def test_random_signs_demand_a_seed(seed):
    with pytest.raises(ValueError, match=re.escape(f"seed {seed!r}; valid: ")):
        transform(normal(4, 16), Hadamard(16, "random"), seed=seed)


@pytest.mark.parametrize(
    "out", [torch.empty(4, 20), torch.empty(4, 32).half(), torch.empty(4, 32, device="meta")]
)
def test_an_unlike_out_is_refused(out):
    text = re.escape("valid: [4, 32] torch.float32 on cpu")
    with pytest.raises(ValueError, match=text):
        transform(normal(4, 20), Hadamard(16), out=out)


@pytest.mark.parametrize("amax", [torch.zeros(1), torch.zeros(()).half()])
def test_an_amax_of_another_kind_is_refused(amax):
    text = re.escape("valid: [] torch.float32 on cpu")
    with pytest.raises(ValueError, match=text):
        transform(normal(4, 20), Hadamard(16), amax=amax)


# -- which implementation ----------------------------------------------------------------------


@pytest.fixture
def implementation(monkeypatch):
    """A function that puts a `transform` in the place of a named implementation."""

    def install(name, function):
        module = ModuleType(name)
        module.transform = function
        name = f"mqo.quant.{backend.MODULES[name]}.hadamard"
        monkeypatch.setitem(sys.modules, name, module)
        forget_implementations()

    return install


def fives(x, out, *_):
    out.fill_(5.0)
    return True


def test_the_one_made_for_the_device_is_asked(implementation):
    implementation("cpu", fives)
    assert transform(normal(4, 32), Hadamard(16)).eq(5).all()


def test_what_it_does_not_support_the_reference_does(implementation):
    implementation("cpu", lambda *_: False)
    x = normal(4, 32)
    expected = hadamard.reference(x, Hadamard(16), -1, None)
    assert transform(x, Hadamard(16)).equal(expected)


def test_one_that_cannot_be_imported_is_passed_over_unless_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "mqo.quant.cpu.hadamard", None)
    x = normal(4, 32)
    expected = hadamard.reference(x, Hadamard(16), -1, None)
    assert transform(x, Hadamard(16)).equal(expected)
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "cpu")
    with pytest.raises(RuntimeError, match="MQO_QUANT_BACKEND=cpu"):
        transform(x, Hadamard(16))


def test_the_environment_chooses(implementation, monkeypatch):
    implementation("cpu", fives)
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "reference")
    assert not transform(normal(4, 32), Hadamard(16)).eq(5).any()
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "numba")
    text = "unknown MQO_QUANT_BACKEND 'numba'; valid: reference, cpu, triton"
    with pytest.raises(ValueError, match=text):
        transform(normal(4, 32), Hadamard(16))


# -- an operator -------------------------------------------------------------------------------


def test_the_operator_keeps_torchs_rules():
    x = normal(36, 70).T
    for amax in (torch.tensor(0.0), None):
        arguments = (x, torch.empty(80, 36), amax, 16, "random", 0, -3)
        torch.library.opcheck(torch.ops.megatron_quant.hadamard, arguments)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiled_function_gives_the_same_bits(assert_same_bits, compiler):
    how = Hadamard(32, "random")

    def function(x):
        amax = torch.zeros(())
        return transform(x * 2, how, axis=0, seed=SEED, amax=amax) + 1, amax

    x = normal(36, 70).T
    torch.compiler.reset()
    result, amax = torch.compile(function, backend=compiler, fullgraph=True)(x)
    expected = hadamard.reference(x * 2, how, 0, SEED)
    assert_same_bits(result, expected + 1)
    assert amax == expected.abs().max()


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_tell_shape_dtype_strides_and_device(device):
    with FakeTensorMode():
        x = torch.empty(70, 36, dtype=torch.bfloat16, device=device).T
        within = transform(x, Hadamard(16, "random"), axis=1, seed=1)
    meta = torch.empty(70, 36, dtype=torch.bfloat16, device="meta").T  # not a fake tensor
    results = [within, *(transform(t, Hadamard(16, "random"), axis=1, seed=1) for t in (x, meta))]
    for result, place in zip(results, (device, device, "meta"), strict=True):
        assert (result.shape, result.stride(), result.dtype) == ((36, 80), (1, 36), x.dtype)
        assert result.device.type == place
