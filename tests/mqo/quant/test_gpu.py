"""The Triton kernels equal the reference bit for bit.

On a CUDA device the tests run there; without one, in Triton's interpreter, on CPU tensors. That has
to be chosen before triton is imported, so a test here starts a process that runs this file again.
"""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant import backend, reference
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS, OVERFLOWS, ROUNDINGS, TILES
from mqo.quant.spec import QuantSpec

triton = pytest.importorskip("triton", reason="no triton here: see test_interpreter.py")

from mqo.quant import gpu  # noqa: E402  it needs triton
from mqo.quant.gpu import tiles  # noqa: E402

from .mx import MX_ELEMENTS, MX_RULES  # noqa: E402
from .tensors import DTYPES, KINDS, every_kind, specs  # noqa: E402
from .triton_runs import ROOT, ahead, run_in_the_interpreter  # noqa: E402

IN_INTERPRETER = gpu.INTERPRETED
ON_CUDA = torch.cuda.is_available() and not IN_INTERPRETER
DEVICE = "cuda" if ON_CUDA else "cpu"

SQUARE_KINDS = tuple(kind for kind in KINDS if FORMATS[kind].square)
# A format of each kind of scale: what a kernel is specialized by.
SCALES = tuple({FORMATS[kind].scale: kind for kind in KINDS}.values())
TWO_LEVELS = tuple(kind for kind in KINDS if FORMATS[kind].scale == "two-level")
BY_ERROR = ("four-over-six-mse", "four-over-six-mae")
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

runs_kernels = pytest.mark.skipif(
    not (ON_CUDA or IN_INTERPRETER),
    reason="no CUDA device: these run in the process that the interpreter's test starts",
)
needs_cuda = pytest.mark.skipif(not ON_CUDA, reason="no CUDA device")
# NaN and Infinity are met on purpose, and NumPy tells.
quietly = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_scale = pytest.mark.parametrize("kind", SCALES)
every_mx = pytest.mark.parametrize("kind", tuple(MX_ELEMENTS))
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
heavy = pytest.mark.heavy  # the interpreter takes seconds a case


def in_any_binade(test):
    """Mark a test that runs kernels on numbers of all magnitudes."""
    return runs_kernels(quietly(test))


def exhaustive(test):
    return heavy(in_any_binade(test))


# -- the interpreter ---------------------------------------------------------------------------


in_the_parent = pytest.mark.skipif(IN_INTERPRETER, reason="starts the interpreter's process")


@in_the_parent
def test_this_file_in_the_interpreter():
    assert run_in_the_interpreter(__file__, "not heavy") > 50


@in_the_parent
@heavy
def test_this_file_in_the_interpreter_exhaustively():
    assert run_in_the_interpreter(__file__, "heavy") > 0


# -- what may come in --------------------------------------------------------------------------


def random(*shape, seed=0, kind=torch.randn, **options):
    return kind(*shape, generator=torch.Generator().manual_seed(seed), **options)


def patterns(shape, dtype, seed=0):
    """Random bits: every magnitude alike, with Inf and NaN among them."""
    bits = random(-(2**31), 2**31, shape, seed=seed, kind=torch.randint)
    if dtype == torch.float32:
        return bits.to(torch.int32).view(dtype)
    return (bits >> 16).to(torch.int16).view(dtype)


def spread(shape, dtype, seed=0):
    """Finite values whose neighbors are alike in magnitude, and whose rows are not."""
    rows = random(-150, 128, shape[:1], seed=seed, kind=torch.randint).double()
    rows = rows.reshape(shape[:1] + (1,) * (len(shape) - 1))
    largest = torch.finfo(dtype).max
    x = random(*shape, seed=seed + 1).double() * torch.exp2(rows + 3 * random(*shape, seed=seed))
    return x.clamp(-largest, largest).to(dtype)


def small(shape, dtype, seed=0):
    """Subnormals, zeros, and normal values close to them."""
    top = torch.finfo(dtype).tiny
    return (random(*shape, seed=seed).double() * top * 4).to(dtype)


SOURCES = (patterns, spread, small, lambda shape, dtype, seed: random(*shape, seed=seed).to(dtype))


@st.composite
def tensors(draw, ranks=(1, 4)):
    """A tensor on the device, of some shape (empty ones too), dtype and layout; and an axis."""
    sizes = st.one_of(st.integers(0, 5), st.sampled_from((31, 32, 33, 70, 140)))
    shape = draw(st.lists(sizes, min_size=ranks[0], max_size=ranks[1]))
    while torch.Size(shape).numel() > 2**10:  # the interpreter takes 10 ms a tile
        shape[shape.index(max(shape))] = 2
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    step = draw(st.sampled_from((1, 1, 2)))
    source, dtype = draw(st.sampled_from(SOURCES)), draw(st.sampled_from(DTYPES))
    x = source(tuple(step * size for size in shape), dtype, draw(st.integers(0, 99)))
    x = x.to(DEVICE)[tuple(slice(None, None, step) for _ in shape)]
    return x.permute(draw(st.permutations(range(len(shape))))), axis


seeds = st.one_of(st.sampled_from((0, 1, 2**63, 2**64 - 1)), st.integers(0, 2**64 - 1))


@pytest.fixture(scope="session")
def assert_equals_reference(assert_same_bits):
    """A function that quantizes with both, and returns what they made of it."""

    def check(x, spec, axis=-1, seed=0, amax=None):
        expected = reference.qdq(x.cpu(), spec, axis, seed=seed, amax=amax)
        amax = amax if amax is None else amax.to(DEVICE)
        actual = gpu.qdq(x, spec, axis, seed=seed, amax=amax)
        assert actual.device == x.device
        assert_same_bits(actual.cpu(), expected)
        return actual

    return check


# -- every input -------------------------------------------------------------------------------


@in_any_binade
@settings(max_examples=150, deadline=None, derandomize=True)
@given(tensors(), specs, seeds, st.sampled_from((None, None, 1e-30, 0.7, 1e5)))
def test_any_tensor(assert_equals_reference, tensor_and_axis, spec, seed, amax):
    x, axis = tensor_and_axis
    before = x.clone()
    assert_equals_reference(x, spec, axis, seed, amax if amax is None else torch.tensor(amax))
    assert x.view(INTEGERS[x.dtype]).equal(before.view(INTEGERS[x.dtype]))


@exhaustive
@every_kind
@every_rounding
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_magnitudes(assert_equals_reference, kind, rounding, dtype):
    for source in SOURCES:
        x = source((36, 160), dtype, 3).to(DEVICE)
        for axis in (0, 1):
            assert_equals_reference(x, QuantSpec(kind, rounding=rounding), axis, seed=5)


@exhaustive
@pytest.mark.parametrize("kind", SQUARE_KINDS)
@every_rounding
@pytest.mark.parametrize("dtype", DTYPES)
def test_squares(assert_equals_reference, kind, rounding, dtype):
    spec = QuantSpec(kind, rounding=rounding, tile="square")
    for source in SOURCES:
        x = source((5, 40, 36), dtype, 4).to(DEVICE)
        for axis in range(3):  # of the middle one, the rows are no dimension of the memory
            assert_equals_reference(x, spec, axis, seed=6)


@in_any_binade
@pytest.mark.parametrize("kind", TWO_LEVELS)
@pytest.mark.parametrize("rule", BY_ERROR)
@pytest.mark.parametrize("tile", TILES)
def test_scales_by_error(assert_equals_reference, kind, rule, tile):
    for source in SOURCES:
        for dtype, rounding in ((torch.float32, None), (torch.bfloat16, "stochastic")):
            spec = QuantSpec(kind, scale_rule=rule, tile=tile, rounding=rounding)
            x = source((35, 40), dtype, 3).to(DEVICE)
            for axis in (0, 1):
                assert_equals_reference(x, spec, axis, seed=5)
            largest = x.nan_to_num(posinf=1.0).abs().max().float().cpu()
            assert_equals_reference(x.nan_to_num(), spec, amax=largest / 7)


VECTORS = np.load(ROOT / "tests" / "vectors" / "recipes_vectors.npz")
VECTOR_SPECS = {kind: QuantSpec(kind) for kind in KINDS} | {
    "nvfp4_1x16": QuantSpec("nvfp4"),
    "nvfp4_16x16": QuantSpec("nvfp4", tile="square"),
    "fp8_1x128": QuantSpec("fp8_block"),
    "fp8_128x128": QuantSpec("fp8_block", tile="square"),
    "fp8_1x128_fp32scale": QuantSpec("fp8_block_fp32"),
}


@in_any_binade
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=() if key.endswith("/special") else heavy)
        for key in VECTORS
        if key.split("/")[0] in VECTOR_SPECS
    ],
)
def test_the_stored_vectors(assert_same_bits, key):
    name, case = key.split("/")
    x, spec = torch.from_numpy(VECTORS[f"in/{case}"]).to(DEVICE), VECTOR_SPECS[name]
    expected = torch.from_numpy(VECTORS[key])
    if name == "mxint8":  # its zero has no sign, but the file's does
        expected = expected.where(expected != 0, 0.0)
    assert_same_bits(gpu.qdq(x, spec).cpu(), expected)
    assert_same_bits(gpu.qdq(x.T.contiguous(), spec, 0).cpu(), expected.T)
    if case == "normal_bf16":
        assert_same_bits(gpu.qdq(x.bfloat16(), spec).cpu(), expected.bfloat16())


@in_any_binade
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_in_hifp8(assert_equals_reference, dtype, rounding, overflow):
    x = torch.arange(2**16, device=DEVICE).to(torch.int16).view(dtype)
    assert_equals_reference(x, QuantSpec("hifp8", rounding=rounding, overflow=overflow), seed=9)


@exhaustive
@pytest.mark.parametrize("scale", [-140, -100, 0, 90, 120])
@pytest.mark.parametrize("kind", ["hifp8", "fp8_tensor_e5m2", "nvfp4"])
@every_rounding
def test_the_scale_of_a_tensor(assert_equals_reference, kind, rounding, scale):
    x = (random(40, 60).double() * 2.0**scale).float().to(DEVICE)
    spec = QuantSpec(kind, rounding=rounding, tensor_scale=True)
    assert_equals_reference(x, spec, seed=2)
    for special in (0.0, torch.inf, torch.nan):
        assert_equals_reference(torch.full((3, 4), special, device=DEVICE), spec, seed=2)


@exhaustive
@pytest.mark.parametrize("kind", ["hifp8", "fp8_tensor_e4m3", "fp8_tensor_e5m2", "nvfp4"])
@pytest.mark.parametrize("amax", [0.0, 1e-40, 0.3, 700.0, torch.inf, torch.nan])
def test_an_amax_that_is_given(assert_equals_reference, kind, amax):
    # Values beyond it, those that are not finite among them, are taken for the largest or for 0.
    spec = QuantSpec(kind, tensor_scale=True)
    for source in SOURCES:
        x = source((40, 60), torch.float32, 8).to(DEVICE)
        assert_equals_reference(x, spec, amax=torch.tensor(amax))


@exhaustive
@pytest.mark.parametrize("kind", ["fp8_tensor_e4m3", "fp8_tensor_e5m2"])
@every_rounding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_under_the_scale_of_a_tensor(
    assert_equals_reference, kind, rounding, dtype
):
    x = torch.arange(2**16, device=DEVICE).to(torch.int16).view(dtype)
    for amax in (1e-38, 2.5, 3e38):
        spec = QuantSpec(kind, rounding=rounding)
        assert_equals_reference(x, spec, seed=3, amax=torch.tensor(amax))


def blocks_of_scale(exponent):
    """Blocks of 16, [blocks, 16]: 2^exponent, and every bfloat16 that leaves it the floor scale."""
    positive = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16)
    fitting = positive[positive < 2.0 ** (exponent + 1)]
    fitting = torch.cat((fitting, fitting[: -len(fitting) % 15])).reshape(-1, 15)
    fitting[:, ::2] *= -1
    return torch.nn.functional.pad(fitting, (1, 0), value=2.0**exponent)


@pytest.fixture
def large_tiles(monkeypatch):
    """Spares the interpreter most of its tiles, each of which costs it 10 ms and more."""
    if IN_INTERPRETER:
        tiles.plan_tiles.cache_clear()
        monkeypatch.setattr(tiles, "_tile", lambda *_: (tiles.Tile(2**13, 16, False), 4))
    yield
    tiles.plan_tiles.cache_clear()


# From the smallest scale, 2^-127, to that of the largest amax.
@runs_kernels
@heavy
@pytest.mark.usefixtures("large_tiles")
@every_mx
@pytest.mark.parametrize("rounding", ["nearest-even", "nearest-away"])
def test_every_pattern_under_every_scale(assert_equals_reference, kind, rounding):
    spec, pairs = QuantSpec(kind, block=16, rounding=rounding), 0
    for exponent in range(MX_ELEMENTS[kind].emax - 127, 128):
        x = blocks_of_scale(exponent).to(DEVICE)
        assert_equals_reference(x, spec)
        pairs += x[:, 1:].numel()
    assert pairs > 4_000_000


@exhaustive
@pytest.mark.usefixtures("large_tiles")
@every_mx
@pytest.mark.parametrize("rule", MX_RULES)
def test_every_pattern_alone_in_its_block(assert_equals_reference, kind, rule):
    x = torch.arange(2**16, device=DEVICE).to(torch.int16).view(torch.bfloat16)
    assert_equals_reference(x.reshape(1, -1), QuantSpec(kind, scale_rule=rule, block=16), 0)


# -- shapes and strides ------------------------------------------------------------------------


@runs_kernels
@every_scale
@pytest.mark.parametrize("shape", [(0,), (3, 0, 4), (0, 32)])
def test_an_empty_tensor(kind, shape):
    for axis in range(len(shape)):
        assert gpu.qdq(torch.empty(shape, device=DEVICE), QuantSpec(kind), axis).shape == shape


@runs_kernels
def test_a_scalar():
    for kind, expected in (("hifp8", 1.0), ("fp8_tensor_e4m3", 1.06)):
        for scaled in (False, True):
            result = gpu.qdq(
                torch.tensor(1.06, device=DEVICE), QuantSpec(kind, tensor_scale=scaled)
            )
            assert result.shape == ()
            assert result.cpu() == torch.tensor(expected)


@runs_kernels
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "hifp8"])
@pytest.mark.parametrize("axis", [0, 2, 4])
def test_more_strides_than_the_kernel_has(assert_equals_reference, kind, axis):
    x = random(4, 6, 8, 10, 6).to(DEVICE)[::2, ::2, ::2, ::2, ::2].permute(3, 1, 4, 0, 2)
    spec = QuantSpec(kind, rounding="stochastic", block=16, tile="square")
    result = assert_equals_reference(x, spec, axis, seed=8)
    out = torch.empty_like(x.permute(4, 3, 2, 1, 0)).permute(4, 3, 2, 1, 0)
    assert gpu.qdq(x, spec, axis, out, 8) is out
    assert out.equal(result)


@runs_kernels
@pytest.mark.parametrize("kind", ["mxfp8", "hifp8"])
def test_an_expanded_tensor(assert_equals_reference, kind):
    x = random(70).to(DEVICE).expand(5, 70)
    for axis in (0, 1):
        assert_equals_reference(x, QuantSpec(kind), axis)


@runs_kernels
@every_scale
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_out_of_any_strides_and_the_tensor_itself(assert_same_bits, kind, axis):
    x, spec = random(5, 40, 36).to(DEVICE).bfloat16(), QuantSpec(kind)
    expected = reference.qdq(x.cpu(), spec, axis)
    out = torch.zeros(72, 5, 80, device=DEVICE).bfloat16()[::2, :, ::2].permute(1, 2, 0)
    for target in (out, x):
        assert gpu.qdq(x, spec, axis, target) is target
        assert_same_bits(target.cpu(), expected)


@runs_kernels
def test_offsets_beyond_31_bits(assert_same_bits):
    # Only the pages of its 36 elements are ever touched.
    sparse = torch.empty(35 * 2**26 + 1, dtype=torch.bfloat16, device=DEVICE)[:: 2**26]
    sparse.copy_(random(36).to(DEVICE))
    for kind in ("mxfp8", "hifp8"):
        spec = QuantSpec(kind)
        expected = reference.qdq(sparse.cpu(), spec)
        assert_same_bits(gpu.qdq(sparse, spec).cpu(), expected)
        gpu.qdq(sparse, spec, out=sparse)
        assert_same_bits(sparse.cpu(), expected)


# -- as a backend ------------------------------------------------------------------------------


@pytest.fixture
def asked_for(monkeypatch):
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "triton")
    backend._load.cache_clear()
    yield
    backend._load.cache_clear()


@runs_kernels
def test_the_backend_calls_it(asked_for, monkeypatch, assert_same_bits):
    x, spec = random(36, 70).to(DEVICE), QuantSpec("mxfp8", rounding="stochastic")
    expected = reference.qdq(x.cpu(), spec, seed=2**64 - 1)
    monkeypatch.setattr(reference, "qdq", None)
    assert_same_bits(fake_quantize(x, spec, seed=2**64 - 1).cpu(), expected)


@pytest.mark.skipif(IN_INTERPRETER, reason="the interpreter takes CPU tensors")
def test_a_cpu_tensor_is_left_to_the_reference(asked_for):
    x = random(4, 64)
    assert gpu.qdq(x, QuantSpec("mxfp8")) is None
    result = fake_quantize(x, QuantSpec("mxfp8"))
    assert result.equal(reference.qdq(x, QuantSpec("mxfp8")))


@in_the_parent
def test_without_triton_there_is_no_such_module():
    code = "import sys; sys.modules['triton'] = None; import mqo.quant.gpu"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "Megatron-LM")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr


# -- as compiled for a device, which need not be there -----------------------------------------


compiles_ahead = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3),
    reason="older versions take their source in another way",
)
COMPILED = [
    *((QuantSpec(kind), axis) for kind in SCALES for axis in (-1, 0)),
    *((QuantSpec(kind, tile="square"), -1) for kind in SQUARE_KINDS),
    *((QuantSpec("nvfp4", scale_rule=BY_ERROR[0]), axis) for axis in (-1, 0)),
    (QuantSpec("nvfp4", scale_rule=BY_ERROR[1], tile="square"), -1),
    (QuantSpec("mxfp4", rounding="nearest-away"), 0),
    (QuantSpec("mxfp8", rounding="stochastic"), -1),
    (QuantSpec("hifp8", rounding="stochastic", tensor_scale=True), -1),
    (QuantSpec("hifp8", rounding="nearest-even", overflow="inf"), -1),
]


@in_the_parent
@compiles_ahead
@pytest.mark.parametrize(("spec", "axis"), COMPILED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_compiles_to_wide_accesses_and_no_flushing(spec, axis, dtype):
    x = torch.empty(8192, 8192, dtype=dtype, device="meta")

    def launch():
        gpu._launch(x, x, spec, axis, 7, None)

    (kernel,) = ahead.compiled(gpu, ["_kernel"], launch)
    ptx = kernel.asm["ptx"]
    assert ".ftz" not in ptx
    wide = "global.v4.b32"
    assert set(re.findall(r"\bld\.(global\S*)", ptx)) <= {wide, "global.b32"}
    assert set(re.findall(r"\bst\.(global\S*)", ptx)) == {wide}
    # 16 bytes a thread, each once.
    assert len(re.findall(r"\bst\.global", ptx)) == len(re.findall(rf"ld\.{wide}", ptx))


@in_the_parent
@compiles_ahead
@pytest.mark.parametrize(
    ("kind", "shape", "axis"), [("mxfp8", (1, 32), -1), ("nvfp4", (16, 1), 0), ("hifp8", (3,), -1)]
)
def test_it_compiles_where_a_thread_has_one_element(kind, shape, axis):
    """What takes two of bfloat16 at a time then takes one and nothing."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def launch():
        gpu._launch(x, x, QuantSpec(kind), axis, 7, None)

    (kernel,) = ahead.compiled(gpu, ["_kernel"], launch)
    assert "0xffff0000" in kernel.asm["ptx"]


# -- on a device -------------------------------------------------------------------------------


@needs_cuda
@every_kind
def test_a_graph_replays_it_on_other_contents(assert_same_bits, kind):
    x = random(128, 512).cuda().bfloat16()
    specs = [QuantSpec(kind), QuantSpec(kind, tensor_scale=True)]
    for spec in specs:
        gpu.qdq(x, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [gpu.qdq(x, spec) for spec in specs]
    x.copy_(random(128, 512, seed=1) * 100)
    graph.replay()
    for spec, actual in zip(specs, results, strict=True):
        assert_same_bits(actual.cpu(), reference.qdq(x.cpu(), spec))


@needs_cuda
def test_nothing_waits_for_the_device():
    x = random(128, 512).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for kind in KINDS:
            gpu.qdq(x, QuantSpec(kind, tensor_scale=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_a_tensor_of_another_than_the_current_device(assert_same_bits):
    x = random(64, 64).to("cuda:1")
    actual = gpu.qdq(x, QuantSpec("mxfp8"))
    assert actual.device == x.device
    assert_same_bits(actual.cpu(), reference.qdq(x.cpu(), QuantSpec("mxfp8")))
