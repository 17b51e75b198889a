"""The compiled Hadamard transform: the reference's bits for every layout, size and thread."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant.hadamard import reference, transform
from mqo.quant.spec import Hadamard

pytest.importorskip("numba")

from mqo.quant.cpu import hadamard as cpu

from .tensors import DTYPES, OtherTensor, every_dtype, every_size, hadamards

SEED = 2**64 - 7


def finite(*shape, dtype=torch.float32, seed=0):
    """Values of all binades and of a few, with zeros of both signs and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    patterns = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    rare = torch.rand(shape, generator=generator)
    x = torch.where(rare < 0.02, patterns.view(torch.float32), x)
    x = torch.where(rare > 0.9, 0.0, x) * x.sign().nan_to_num()
    x = torch.where(rare > 0.95, -x, x).to(dtype)
    return torch.where(x.isfinite(), x, 1.0)


def run(x, how, axis=-1, amax=None):
    """What the kernels make of `x`; that they do not leave it to the reference is a part of it."""
    shape = list(x.shape)
    shape[axis] += -shape[axis] % how.points
    out = torch.full(shape, 7.0, dtype=x.dtype)
    assert cpu.transform(x, out, how, axis, SEED, amax)
    return out


@st.composite
def tensors(draw):
    """A tensor of some shape, dtype, layout and content, and one of its axes."""
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 40 if dims == 3 else 280)) for _ in range(dims)]
    axis = draw(st.integers(-dims, dims - 1))
    dtype = draw(st.sampled_from(DTYPES))
    x = finite(*(2 * size for size in shape), dtype=dtype, seed=draw(st.integers(0, 99)))
    x = x * draw(st.sampled_from((1.0, 2.0**-120, 2.0**-133, 1e38)))
    # A slice has gaps, and may begin where no vector would be aligned.
    steps = [draw(st.sampled_from((1, 2))) for _ in shape]
    cut = tuple(slice(1, 1 + n * k, k) for n, k in zip(shape, steps, strict=True))
    x = x[cut] if draw(st.booleans()) else x
    if draw(st.integers(0, 9)) == 0:
        x = x[:1].expand(3, *x.shape[1:])
    return x.permute(draw(st.permutations(range(dims)))), axis


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tensors(), hadamards)
def test_any_tensor_gives_the_references_bits(assert_same_bits, tensor_and_axis, how):
    x, axis = tensor_and_axis
    before, amax = x.clone(), torch.tensor(-1.0)
    expected = reference(x, how, axis, SEED)
    assert_same_bits(run(x, how, axis, amax), expected)
    assert_same_bits(x, before)
    largest = expected.float().abs().max()
    assert amax.equal(largest) or (amax.isnan() and expected.isnan().any())
    through_the_interface = transform(x, how, axis=axis, seed=SEED)
    assert_same_bits(through_the_interface, expected)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), hadamards)
def test_any_float32_patterns_give_the_references_values(assert_same_bits, bits, how):
    # Infinity and NaN among them: what is not finite is so in both, with the sign of Infinity.
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    for each in (x, x.bfloat16(), x.half()):
        for axis, y in ((0, each), (0, each[:, None].expand(-1, 20).contiguous())):
            assert_same_bits(run(y, how, axis), reference(y, how, axis, SEED))


@every_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_bfloat16_pattern_beside_zeros(assert_same_bits, points, dtype, axis):
    # Alone in its block an element becomes all of its results: each is rounded once.
    patterns = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(2**16, points, dtype=dtype)
    x[:, 5] = patterns.to(dtype)
    x = x if axis else x.T.contiguous()
    how = Hadamard(points, "random")
    assert_same_bits(run(x, how, axis), reference(x, how, axis, SEED))


@every_size
@every_dtype
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_large_tensors_in_two_threads(assert_same_bits, two_threads, points, dtype, axis):
    x = finite(3, 261, 331, dtype=dtype)  # more than one share for each thread, and odd ends
    how, amax = Hadamard(points, "random"), torch.tensor(0.0)
    expected = reference(x, how, axis, SEED)
    assert_same_bits(run(x, how, axis, amax=amax), expected)
    assert amax == expected.float().abs().max()


@every_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("height", [256, 250])
def test_columns_that_are_written_past_the_caches(
    assert_same_bits, monkeypatch, two_threads, points, dtype, height
):
    monkeypatch.setattr(cpu, "STREAM_BYTES", 0)
    how = Hadamard(points)
    for width in (608, 600, 601):  # rows at multiples of a line of 64 bytes, and not
        x = finite(height, width, dtype=dtype)
        assert_same_bits(run(x, how, 0), reference(x, how, 0, SEED))
        # In place, in memory that begins anywhere.
        for start in (0, 1):
            place = torch.empty(256 * width + 1, dtype=dtype)[start:][: 256 * width]
            place = place.view(256, width).copy_(finite(256, width, dtype=dtype))
            expected = reference(place, how, 0, SEED)
            assert cpu.transform(place, place, how, 0, SEED, None)
            assert_same_bits(place, expected)


@every_size
@every_dtype
@pytest.mark.parametrize("axis", [0, 1])
def test_only_the_given_memory_is_written(points, dtype, axis):
    for size in (1, 15, 16, 31, 64, 65, 200):
        padded = -(-size // points) * points
        shape = (padded, 3) if axis == 0 else (3, padded)
        frame = torch.full((3, 3 * padded), 7.0, dtype=dtype)
        x = finite(*((size, 3) if axis == 0 else (3, size)), dtype=dtype)
        cpu.transform(x, frame[1].view(shape), Hadamard(points), axis, None, None)
        assert frame[[0, 2]].eq(7).all()


@every_size
@pytest.mark.parametrize("axis", [0, 1])
def test_flushing_denormals_changes_nothing(assert_same_bits, points, axis):
    x = finite(128, 320) * 2.0**-126
    expected = reference(x, Hadamard(points), axis, SEED)
    assert ((expected.abs() < 2.0**-126) & (expected != 0)).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        actual = run(x, Hadamard(points), axis)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(4, 32, device="meta"),
        torch.ones(4, 32).as_subclass(OtherTensor),
        torch.ones(4, 32).to_sparse(),
    ],
)
def test_tensors_without_plain_memory_are_left_to_the_caller(x):
    out, amax = torch.full((4, 32), 7.0), torch.tensor(7.0)
    assert not cpu.transform(x, out, Hadamard(16), -1, None, amax)
    assert out.eq(7).all() and amax == 7


def test_inference_tensors_are_written_too(assert_same_bits):
    with torch.inference_mode():
        x, amax = finite(4, 32), torch.zeros(())
        result = transform(x, Hadamard(16), amax=amax)
    assert_same_bits(result, reference(x, Hadamard(16), -1, None))
    assert amax == result.abs().max()
