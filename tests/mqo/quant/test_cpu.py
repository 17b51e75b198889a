"""The compiled CPU quantizers: the reference's bits for every input, layout and thread."""

import errno
import os
import pickle
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant import reference
from mqo.quant.formats import BLOCK_SIZES, OVERFLOWS, ROUNDINGS
from mqo.quant.spec import QuantSpec

pytest.importorskip("numba")

from mqo.quant import cpu
from mqo.quant.cpu import compile as compiling
from mqo.quant.cpu import threads as cpu_threads

from ... import forking
from .mx import MX_ELEMENTS, MX_RULES
from .tensors import DTYPES, KINDS, OtherTensor, every_dtype, every_kind, normal, specs

TOOLS = Path(__file__).parents[3] / "tools"
SEED = 2**64 - 7
every_element = pytest.mark.parametrize("kind", tuple(MX_ELEMENTS))


def wild(*shape, dtype=torch.float32, seed=0):
    """Values of all binades and of a few, with zeros, denormals, Inf and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    x = normal(*shape, seed=seed) * torch.exp2(30 * normal(*shape, seed=seed + 1))
    patterns = torch.randint(-(2**31), 2**31, shape, generator=generator)
    rare = torch.rand(shape, generator=generator)
    x = torch.where(rare < 0.01, patterns.to(torch.int32).view(torch.float32), x)
    return torch.where(rare > 0.9, 0.0, x).to(dtype)


def patterns(magnitudes, dtype):
    """A tensor of these patterns of bfloat16 magnitudes, each with either sign."""
    bits = torch.stack([magnitudes, magnitudes | 0x8000], -1).to(torch.int32) << 16
    return bits.view(torch.float32).to(dtype)


def assert_like_reference(assert_same_bits, x, spec, axis=-1):
    expected = reference.qdq(x, spec, axis, seed=SEED)
    actual = cpu.qdq(x, spec, axis, seed=SEED)
    if actual is None:
        drawn_squares = spec.tile == "square" and spec.rounding == "stochastic"
        assert drawn_squares or (spec.quant_type, spec.rounding) == ("hifp8", "nearest-even")
        return
    assert actual.stride() == expected.stride()
    assert_same_bits(actual, expected)


# -- every input -------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    """A tensor of some shape (empty ones too), dtype, layout and content, and one of its axes."""
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(0, 22 if dims == 3 else 70)) for _ in range(dims)]
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    make = draw(st.sampled_from((normal, wild)))
    dtype = draw(st.sampled_from(DTYPES))
    x = make(*(2 * size for size in shape), dtype=dtype, seed=draw(st.integers(0, 99)))
    x = x * draw(st.sampled_from((1.0, 2.0**-120, 2.0**-133, 2.0**120)))
    # A slice has gaps, and may begin where no vector would be aligned.
    steps = draw(st.lists(st.sampled_from((1, 2)), min_size=len(shape), max_size=len(shape)))
    cut = tuple(slice(1, 1 + n * k, k) for n, k in zip(shape, steps, strict=True))
    x = x[cut] if draw(st.booleans()) else x
    if draw(st.integers(0, 9)) == 0 and x.shape[0] > 0:
        x = x[:1].expand(3, *x.shape[1:])
    return x.permute(draw(st.permutations(range(len(shape))))), axis


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tensors(), specs)
def test_any_tensor_gives_the_references_bits(assert_same_bits, tensor_and_axis, spec):
    x, axis = tensor_and_axis
    before = x.clone()
    assert_like_reference(assert_same_bits, x, spec, axis)
    assert_same_bits(x, before)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), specs)
def test_any_float32_patterns_give_the_references_bits(assert_same_bits, bits, spec):
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert_like_reference(assert_same_bits, x, spec)


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("below", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
def test_hifp8_around_every_bfloat16_value(assert_same_bits, overflow, below):
    bits = patterns(torch.arange(0x8000), torch.float32).view(torch.int32) | below
    spec, x = QuantSpec("hifp8", overflow=overflow), bits.view(torch.float32)
    assert_like_reference(assert_same_bits, x, spec)
    if below == 0:
        assert_like_reference(assert_same_bits, x.bfloat16(), spec)


@pytest.mark.parametrize("kind", ["fp8_tensor_e4m3", "fp8_tensor_e5m2"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 1e-3, 1.0, 447.0, 3.38e38])
def test_every_bfloat16_pattern_under_a_tensors_scale(assert_same_bits, kind, rounding, amax):
    every = patterns(torch.arange(0x7F80), torch.bfloat16)  # also those that the amax saturates
    spec, largest = QuantSpec(kind, rounding=rounding), torch.tensor(amax)
    for x in (every, every.float()):
        expected = reference.qdq(x, spec, seed=SEED, amax=largest)
        assert_same_bits(cpu.qdq(x, spec, seed=SEED, amax=largest), expected)


def blocks_of_one_scale(exponent, dtype):
    """All bfloat16 values up to the largest of a binade, 31 to a block with that largest one."""
    amax = exponent << 7 | 0x7F
    values = patterns(torch.arange(amax + 1), dtype).flatten()
    values = torch.nn.functional.pad(values, (0, -values.numel() % 31)).view(-1, 31)
    return torch.nn.functional.pad(values, (1, 0), value=patterns(torch.tensor(amax), dtype)[0])


@every_element
def test_every_pair_of_bfloat16_pattern_and_scale(assert_same_bits, kind):
    # The largest magnitude that has a scale is the last of a binade under the floor rule, so this
    # covers the pairs of the other rules, too. Rows are read by one kernel, columns by another.
    spec = QuantSpec(kind)
    for exponent in range(255):
        x = blocks_of_one_scale(exponent, torch.bfloat16)
        expected = reference.qdq(x, spec)
        wide = cpu.qdq(x.float(), spec)
        assert_same_bits(cpu.qdq(x, spec), expected)
        assert_same_bits(wide.bfloat16(), expected)
        assert wide.bfloat16().float().equal(wide)
        assert_same_bits(cpu.qdq(x.t().contiguous(), spec, 0).t(), expected)


@every_element
@pytest.mark.parametrize("rule", MX_RULES)
@pytest.mark.parametrize("below", [0, 1, 0xFFFF])
def test_every_amax_under_every_rule(assert_same_bits, kind, rule, below):
    # `below` are the bits that only float32 has; Inf and NaN are among the patterns.
    amax = torch.arange(0x8000)[:, None]
    bits = (amax - torch.arange(32) * 57).clamp(min=0) << 16
    x = torch.where(bits > 0, bits | below, 0).to(torch.int32).view(torch.float32)
    spec = QuantSpec(kind, scale_rule=rule)
    expected = reference.qdq(x, spec)
    assert_same_bits(cpu.qdq(x, spec), expected)
    assert_same_bits(cpu.qdq(x.t().contiguous(), spec, 0).t(), expected)
    if below == 0:
        assert_same_bits(cpu.qdq(x.bfloat16(), spec), expected.bfloat16())


@every_kind
@every_dtype
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (1, 1, 1)])
def test_the_smallest_tensors(assert_same_bits, kind, dtype, shape):
    x = normal(*shape, dtype=dtype)
    if x.dim() or not QuantSpec(kind).block:
        assert_like_reference(assert_same_bits, x, QuantSpec(kind), 0)


# Many formats have a block size of their own.
SPECS = dict.fromkeys(QuantSpec(kind, block=block) for kind in KINDS for block in BLOCK_SIZES)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.quant_type}, {spec.tile_text}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_large_tensors_in_two_threads(assert_same_bits, two_threads, spec, dtype, axis):
    x = wild(3, 261, 331, dtype=dtype)  # more than one share for each thread, and odd ends
    assert_like_reference(assert_same_bits, x, spec, axis)


# -- out ---------------------------------------------------------------------------------------


@every_kind
@every_dtype
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layout", ["same", "turned", "gaps", "offset"])
def test_out_is_written_whatever_its_strides(assert_same_bits, kind, dtype, axis, layout):
    x = normal(70, 90, dtype=dtype)
    frame = torch.full((2, 150, 200), 7.0, dtype=dtype)
    out = {
        "same": torch.empty_like(x),
        "turned": torch.empty(90, 70, dtype=dtype).t(),
        "gaps": frame[0, 3:143:2, 5:95],
        "offset": torch.empty(90 * 70 + 1, dtype=dtype)[1:].view(70, 90),
    }[layout]
    assert cpu.qdq(x, QuantSpec(kind), axis, out) is out
    assert_same_bits(out, reference.qdq(x, QuantSpec(kind), axis))
    if layout == "gaps":
        out.fill_(7.0)
        assert frame.eq(7).all()


@every_kind
@every_dtype
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("step", [1, 2])
def test_out_may_be_the_tensor_itself(assert_same_bits, kind, dtype, axis, step):
    x = wild(70, 180, dtype=dtype)[:, ::step]
    expected = reference.qdq(x, QuantSpec(kind), axis)
    assert cpu.qdq(x, QuantSpec(kind), axis, x) is x
    assert_same_bits(x, expected)


@every_kind
def test_only_the_given_memory_is_written(kind):
    for size in (1, 31, 32, 63, 64, 65, 200):
        frame = torch.full((3, 256), 7.0).bfloat16()
        cpu.qdq(normal(size, dtype=torch.bfloat16), QuantSpec(kind), 0, frame[1, :size])
        assert frame[1, size:].eq(7).all()
        assert frame[[0, 2]].eq(7).all()


def test_autograd_notices_what_is_written_into_out():
    x, saved = normal(4, 32), normal(4, 32)
    loss = (saved * normal(4, 32).requires_grad_()).sum()
    cpu.qdq(x, QuantSpec("mxfp8"), -1, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_are_written_too(assert_same_bits):
    with torch.inference_mode():
        x, out = normal(4, 32), torch.empty(4, 32)
        cpu.qdq(x, QuantSpec("mxfp8"), -1, out)
    assert_same_bits(out, reference.qdq(x, QuantSpec("mxfp8")))


def test_a_read_only_tensor_may_be_read(assert_same_bits, tmp_path):
    x = normal(64, 64)
    path = tmp_path / "x"
    path.write_bytes(x.numpy().tobytes())
    path.chmod(0o400)
    with path.open("rb") as file:
        mapped = torch.from_file(file.name, shared=False, size=4096).view(64, 64)
        assert_like_reference(assert_same_bits, mapped, QuantSpec("mxfp8"))


# -- not supported -----------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
def test_what_it_cannot_do_it_leaves_to_the_caller(scaled):
    spec = QuantSpec("hifp8", rounding="nearest-even", tensor_scale=scaled)
    out = torch.full((4, 32), 7.0)
    assert cpu.qdq(normal(4, 32), spec, -1, out, 3) is None
    assert out.eq(7).all()


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(4, 32, device="meta"),
        normal(4, 32).double(),
        normal(4, 32).as_subclass(OtherTensor),
        normal(4, 32).to_sparse(),
    ],
)
def test_tensors_without_plain_memory_are_left_to_the_caller(x):
    assert cpu.qdq(x, QuantSpec("mxfp8")) is None


def test_a_traced_call_is_left_to_the_caller(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert cpu.qdq(normal(4, 32), QuantSpec("mxfp8")) is None


# -- threads -----------------------------------------------------------------------------------


@every_kind
def test_calls_from_several_python_threads_do_not_disturb_each_other(
    assert_same_bits, two_threads, kind
):
    inputs = [wild(300, 400, seed=i) for i in range(4)]
    expected = [reference.qdq(x, QuantSpec(kind)) for x in inputs]
    together = threading.Barrier(len(inputs))

    def work(x):
        together.wait(timeout=60)
        return [cpu.qdq(x, QuantSpec(kind)) for _ in range(20)]

    with ThreadPoolExecutor(len(inputs)) as pool:
        for results, right in zip(pool.map(work, inputs), expected, strict=True):
            for result in results:
                assert_same_bits(result, right)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_torch_says_how_many_threads(monkeypatch, threads):
    seen = []

    def parallel(kernel, address, count, _):
        seen.append(count)
        kernel(address)

    monkeypatch.setattr(cpu_threads, "_PARALLEL", parallel)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cpu.qdq(normal(512, 512), QuantSpec("mxfp8"))
    cpu.qdq(normal(64, 64), QuantSpec("mxfp8"))  # too small to share
    assert seen == ([threads] if threads > 1 else [])


def test_one_thread_does_everything_where_torch_has_no_openmp(
    assert_same_bits, monkeypatch, two_threads
):
    monkeypatch.setattr(cpu_threads, "_PARALLEL", None)
    assert_like_reference(assert_same_bits, normal(512, 512), QuantSpec("mxfp8"))


@every_kind
@pytest.mark.parametrize("axis", [0, 1])
def test_flushing_denormals_changes_nothing(assert_same_bits, kind, axis):
    x = wild(64, 320) * 2.0**-100
    x[:32, :32] = normal(32, 32) * 2.0**-126
    expected = reference.qdq(x, QuantSpec(kind), axis)
    if kind in MX_ELEMENTS:
        assert ((expected.abs() < 2.0**-126) & (expected != 0)).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        actual = cpu.qdq(x, QuantSpec(kind), axis)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(actual, expected)


# -- compiled once -----------------------------------------------------------------------------

PROGRAM = """
import torch
from mqo.quant import QuantSpec, cpu
cpu.qdq(torch.ones(4, 32), QuantSpec("mxfp8"))
cpu.qdq(torch.ones(4, 32), QuantSpec("hifp8"))
from mqo.quant.cpu import kernels
from mqo.quant.cpu.compile import kernel
from mqo.quant.cpu.arithmetic import Scheme
scheme = Scheme("e8m0", "nearest-even", "minifloat")
keys = (kernels.rows, 32, 32, scheme), (kernels.hif8, 32)
print(*(kernel(*key).owner.cache_hits for key in keys))
print(cpu.__file__)
"""


def cache_hits(tree, cache):
    """How many kernels a process that runs this tree finds, of two."""
    environment = os.environ | {"PYTHONPATH": str(tree), compiling.CACHE_VARIABLE: str(cache)}
    done = forking.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    numbers, path = done.stdout.splitlines()
    assert path.startswith(str(tree))
    return sum(map(int, numbers.split()))


def snapshot(folder):
    """A read-only copy of what is ours, as a run has it."""
    ours = TOOLS / "mqo" / "quant"
    for file in (TOOLS / "mqo/__init__.py", *ours.rglob("*.py*"), *ours.glob("*.toml")):
        if file.suffix == ".pyc":
            continue
        copy = folder / file.relative_to(TOOLS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
        copy.chmod(0o400)
    return folder


@pytest.fixture(scope="module")
def first_cache(tmp_path_factory):
    """What a process that compiled both kernels left behind."""
    folder = tmp_path_factory.mktemp("first")
    assert cache_hits(snapshot(folder / "tree"), folder / "cache") == 0
    return folder / "cache"


@pytest.fixture
def cache(first_cache, tmp_path):
    return shutil.copytree(first_cache, tmp_path / "cache")


def test_another_copy_of_the_source_finds_what_the_first_compiled(cache, tmp_path):
    files = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert cache_hits(snapshot(tmp_path / "tree"), cache) == 2
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == files


def test_a_changed_source_compiles_again(cache, tmp_path):
    tree = snapshot(tmp_path / "tree")
    lanes = tree / "mqo" / "quant" / "cpu" / "lanes.py"
    lanes.chmod(0o600)
    lanes.write_bytes(lanes.read_bytes() + b"\n")
    assert cache_hits(tree, cache) == 0


def flip(file):
    """A bit in the machine code, for which LLVM may end the process."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def link(file):
    kept = file.with_suffix(".kept")
    file.rename(kept)
    file.symlink_to(kept)


class Command:
    """Pickles as a call of os._exit."""

    def __reduce__(self):
        return os._exit, (3,)


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 7),
    "flipped": flip,
    "a pickle without a digest": lambda file: file.write_bytes(pickle.dumps(Command())),
    "sparse": lambda file: os.truncate(file, 1 << 42),
    "a pipe": pipe,
    "a link": link,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_thrown_away_and_written_again(cache, damage):
    for file in list(cache.glob("*.kernel")):
        damage(file)
    assert cache_hits(TOOLS, cache) == 0
    assert cache_hits(TOOLS, cache) == 2


def test_a_kernel_of_another_user_is_not_loaded(cache, monkeypatch):
    file = next(cache.glob("*.kernel"))
    assert compiling._read(file)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert compiling._read(file) is None


def test_a_full_disk_leaves_no_part_of_a_kernel(tmp_path, monkeypatch):
    def fail(*words):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache, data = compiling._Cache("full"), MagicMock(_reduce=dict)
    data.library.has_dynamic_globals = False
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(os, "replace", fail)
    cache.save_overload("signature", data)
    assert list(tmp_path.iterdir()) == []


def test_without_a_place_to_write_nothing_is_kept(tmp_path):
    (tmp_path / "file").write_text("")
    assert cache_hits(TOOLS, tmp_path / "file" / "cache") == 0
