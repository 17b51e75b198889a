"""The Triton kernel of the Hadamard transform equals the reference; see test_gpu.py."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant import backend
from mqo.quant import hadamard as definition
from mqo.quant.hadamard import reference, transform
from mqo.quant.spec import Hadamard

triton = pytest.importorskip("triton", reason="triton is not installed")

from mqo.quant import gpu  # noqa: E402  it needs triton
from mqo.quant.gpu import hadamard as kernels  # noqa: E402

from .tensors import DTYPES, every_size, hadamards, normal  # noqa: E402
from .triton_runs import ahead, run_in_the_interpreter  # noqa: E402

IN_INTERPRETER = gpu.INTERPRETED
ON_CUDA = torch.cuda.is_available() and not IN_INTERPRETER
DEVICE = "cuda" if ON_CUDA else "cpu"
SEED = 2**64 - 7

runs_kernels = pytest.mark.skipif(
    not (ON_CUDA or IN_INTERPRETER),
    reason="no CUDA device: these run in the process that the interpreter's test starts",
)
in_the_parent = pytest.mark.skipif(IN_INTERPRETER, reason="starts the interpreter's process")
# Infinity is met on purpose, and NumPy tells.
quietly = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@in_the_parent
def test_this_file_in_the_interpreter():
    assert run_in_the_interpreter(__file__, "not heavy") > 10


def run(x, how, axis=-1, amax=None):
    """What the kernel makes of `x`; that it does not leave it to the reference is a part of it."""
    shape = list(x.shape)
    shape[axis] += -shape[axis] % how.points
    out = torch.full(shape, 7.0, dtype=x.dtype, device=x.device)
    assert kernels.transform(x, out, how, axis, SEED, amax)
    return out.cpu()


@st.composite
def tensors(draw):
    """A tensor on the device, of some shape, dtype, layout and binade; and an axis."""
    sizes = st.one_of(st.integers(1, 5), st.sampled_from((31, 32, 33, 70, 140)))
    shape = draw(st.lists(sizes, min_size=1, max_size=4))
    while torch.Size(shape).numel() > 2**10:  # the interpreter takes 10 ms a tile
        shape[shape.index(max(shape))] = 2
    step, dtype = draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from(DTYPES))
    x = normal(*(step * size for size in shape), dtype=dtype, seed=draw(st.integers(0, 99)))
    x = x * draw(st.sampled_from((1.0, 0.0, 2.0**-120, 2.0**-133, 1e38)))
    x = x.to(DEVICE)[tuple(slice(None, None, step) for _ in shape)]
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return x.permute(draw(st.permutations(range(len(shape))))), axis


@runs_kernels
@quietly
@settings(max_examples=100, deadline=None, derandomize=True)
@given(tensors(), hadamards)
def test_any_tensor(assert_same_bits, tensor_and_axis, how):
    x, axis = tensor_and_axis
    before, amax = x.clone(), torch.tensor(-1.0, device=DEVICE)
    expected = reference(x.cpu(), how, axis, SEED)
    assert_same_bits(run(x, how, axis, amax), expected)
    assert_same_bits(x.cpu(), before.cpu())
    largest = expected.float().abs().max()
    assert amax.cpu().equal(largest) or (amax.isnan() and expected.isnan().any())


@runs_kernels
@quietly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_16_bit_pattern_beside_zeros(assert_same_bits, dtype):
    # Alone in its block an element becomes all of its results: each is rounded once.
    x = torch.zeros(2**16, 16, dtype=dtype)
    x[:, 5] = torch.arange(2**16).to(torch.int16).view(dtype)
    x = x[x[:, 5].isfinite()]
    how = Hadamard(16, "random")
    assert_same_bits(run(x.to(DEVICE), how), reference(x, how, -1, SEED))


@runs_kernels
@pytest.mark.parametrize("axis", [0, 2, 4])
def test_more_strides_than_the_kernel_has(assert_same_bits, axis):
    x = normal(4, 6, 8, 10, 6).to(DEVICE)[::2, ::2, ::2, ::2, ::2].permute(3, 1, 4, 0, 2)
    how = Hadamard(32)
    assert_same_bits(run(x, how, axis), reference(x.cpu(), how, axis, None))


@runs_kernels
@every_size
@pytest.mark.parametrize("axis", [0, 1])
def test_in_place(assert_same_bits, points, axis):
    x, how = normal(128, 256).bfloat16().to(DEVICE), Hadamard(points)
    expected = reference(x.cpu(), how, axis, None)
    assert kernels.transform(x, x, how, axis, None, None)
    assert_same_bits(x.cpu(), expected)


@runs_kernels
def test_the_interface_calls_it(monkeypatch, assert_same_bits):
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    definition._load.cache_clear()
    x, how = normal(36, 70).to(DEVICE), Hadamard(16, "random")
    expected = reference(x.cpu(), how, 0, SEED)
    monkeypatch.setattr(definition, "reference", None)
    assert_same_bits(transform(x, how, axis=0, seed=SEED).cpu(), expected)


@pytest.mark.skipif(IN_INTERPRETER, reason="the interpreter takes CPU tensors")
def test_a_cpu_tensor_is_left_to_the_caller():
    x, out = normal(4, 64), torch.full((4, 64), 7.0)
    assert not kernels.transform(x, out, Hadamard(16), -1, None, None)
    assert out.eq(7).all()


@in_the_parent
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3),
    reason="older versions take their source in another way",
)
@every_size
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_compiles_to_wide_accesses_and_sums_alone(points, axis, dtype):
    x = torch.empty(8192, 8192, dtype=dtype, device="meta")
    how = Hadamard(points, "random")

    def launch():
        kernels._launch(x, x, how, axis, SEED)

    (kernel,) = ahead.compiled(kernels, ["_kernel"], launch)
    ptx = kernel.asm["ptx"]
    assert ".ftz" not in ptx
    assert not re.findall(r"\bfma", ptx)
    assert set(re.findall(r"\b(?:ld|st)\.(global\S*)", ptx)) == {"global.v4.b32"}


@pytest.mark.skipif(not ON_CUDA, reason="no CUDA device")
def test_a_graph_replays_it_on_other_contents(assert_same_bits):
    x, how = normal(128, 512).cuda().bfloat16(), Hadamard(16)
    amax = torch.zeros((), device="cuda")
    transform(x, how, amax=amax)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = transform(x, how, amax=amax)
    x.copy_(normal(128, 512, seed=1) * 100)
    graph.replay()
    expected = reference(x.cpu(), how, -1, None)
    assert_same_bits(result.cpu(), expected)
    assert amax.cpu() == expected.float().abs().max()
