import importlib.util
import random
import sys
import types
from pathlib import Path

import pytest
import torch
from mqo.megatron import device


def loaded():
    """A copy of the module, with everything decided anew."""
    spec = importlib.util.spec_from_file_location("device_copy", Path(device.__file__))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return loaded()


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return loaded()


@pytest.fixture
def facade(without_cuda):
    return without_cuda.accelerator


# -- where there is CUDA -----------------------------------------------------------------------


def test_with_cuda_the_accelerator_is_torch_cuda_itself(with_cuda):
    assert with_cuda.accelerator is torch.cuda


def test_with_cuda_addresses_and_type_names_are_torchs(with_cuda):
    assert with_cuda.accelerator_type() == "cuda"
    assert with_cuda.accelerator_device("cuda:1") == torch.device("cuda", 1)
    assert with_cuda.accelerator_device("cuda", 1) == torch.device("cuda", 1)
    assert with_cuda.accelerator_tensor_type("torch.cuda.HalfTensor") == "torch.cuda.HalfTensor"


# -- where there is none -----------------------------------------------------------------------


def test_without_cuda_every_address_is_the_cpu(without_cuda):
    assert without_cuda.accelerator_type() == "cpu"
    for address in (("cuda",), ("cuda:3",), ("cuda", 3)):
        assert without_cuda.accelerator_device(*address) == torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "torch.cuda.FloatTensor"),
        (torch.float16, "torch.cuda.HalfTensor"),
        (torch.bfloat16, "torch.cuda.BFloat16Tensor"),
    ],
)
def test_without_cuda_a_type_name_is_what_a_cpu_tensor_says(without_cuda, dtype, name):
    assert torch.empty(1, dtype=dtype).type() == without_cuda.accelerator_tensor_type(name)


def test_code_that_asks_for_cuda_is_told_there_is_none(facade):
    assert not facade.is_available()
    assert not facade.is_initialized()
    assert not facade.is_current_stream_capturing()
    assert facade.get_device_capability() == (0, 0)
    assert facade.get_device_properties(0).major == 0


def test_the_current_device_is_one_that_tensors_can_be_put_on(facade):
    assert torch.ones(2).to(facade.current_device()).sum() == 2


@pytest.mark.parametrize(("ranks", "count"), [(None, 1), ("1", 1), ("8", 8)])
def test_there_is_a_device_for_every_local_rank(facade, monkeypatch, ranks, count):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert facade.device_count() == count


@pytest.mark.parametrize(
    "name",
    [
        "synchronize",
        "empty_cache",
        "set_device",
        "set_stream",
        "init",
        "ipc_collect",
        "reset_peak_memory_stats",
    ],
)
def test_what_only_steers_a_device_does_nothing(facade, name):
    assert getattr(facade, name)() is None


@pytest.mark.parametrize("name", ["device", "stream"])
def test_a_context_switches_nothing_and_lets_errors_through(facade, name):
    with pytest.raises(ZeroDivisionError), getattr(facade, name)(0):
        raise ZeroDivisionError


def test_streams_and_events_answer_as_finished_work(facade):
    stream = facade.Stream(priority=1)
    event = stream.record_event()
    assert isinstance(event, facade.Event)
    assert stream.record_event(event) is event
    assert stream.query()
    assert event.query()
    assert event.elapsed_time(facade.Event(enable_timing=True)) == 0
    assert stream.wait_stream(facade.current_stream()) is None
    assert event.wait(stream) is None
    assert isinstance(facade.default_stream(), facade.Stream)
    with facade.stream(stream):
        pass


def test_there_is_one_queue_so_no_stream_is_a_side_stream(facade):
    assert facade.Stream() == facade.current_stream()
    assert facade.Stream() in {facade.default_stream()}
    assert facade.Stream() != facade.Event()


def test_stand_ins_claim_no_protocol_that_they_do_not_have(facade):
    assert not hasattr(facade.Stream(), "__cuda_stream__")
    assert not hasattr(facade.Stream(), "__len__")


def test_profiler_ranges_do_nothing(facade):
    assert facade.nvtx.range_push("x") is None
    assert facade.nvtx.range_pop() is None


def test_seeding_and_rng_state_are_the_cpu_generators(facade):
    before = torch.get_rng_state()
    try:
        facade.manual_seed(7)
        state = facade.get_rng_state()
        first = torch.rand(3)
        facade.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        facade.random.manual_seed_all(7)
        assert torch.equal(torch.rand(3), first)
        assert facade.initial_seed() == 7
        assert facade.default_generators[0] is torch.default_generator
    finally:
        torch.set_rng_state(before)


def test_memory_is_the_processs(facade):
    total = facade.get_device_properties(0).total_memory
    assert 0 < facade.memory_allocated() < total
    assert 0 < facade.max_memory_reserved() < total
    stats = facade.memory_stats()
    assert stats["num_alloc_retries"] == 0
    assert 0 < stats["allocated_bytes.all.peak"] < total


def test_names_that_it_lacks_are_torchs(facade):
    assert facade.OutOfMemoryError is torch.cuda.OutOfMemoryError
    assert facade.amp is torch.cuda.amp
    with pytest.raises(AttributeError, match="no_such_thing"):
        facade.no_such_thing  # noqa: B018 - it raises


# -- collectives of unequal parts ---------------------------------------------------------------


class Group:
    """The second of two ranks."""

    def rank(self):
        return 1


def test_parts_of_different_sizes_are_gathered(monkeypatch):
    stages = []
    monkeypatch.setattr(device, "HAS_CUDA", False)
    monkeypatch.setattr(device.distributed, "get_global_rank", lambda group, rank: 10 + rank)
    monkeypatch.setattr(
        device.distributed,
        "broadcast",
        lambda part, source, group: stages.append((source, part.tolist())),
    )
    device.all_gather([torch.zeros(1), torch.zeros(3)], torch.arange(3.0), Group())
    assert stages == [(10, [0.0]), (11, [0.0, 1.0, 2.0])]


def test_a_rank_gets_the_sum_of_its_own_part(monkeypatch):
    monkeypatch.setattr(device, "HAS_CUDA", False)
    monkeypatch.setattr(device.distributed, "all_reduce", lambda whole, group: whole.mul_(2))
    own, parts = torch.zeros(3), [torch.ones(1), torch.arange(3.0)]
    device.reduce_scatter(own, parts, Group())
    assert own.tolist() == [0, 2, 4]
    assert parts[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_with_cuda_a_collective_is_torchs_own(monkeypatch, name):
    monkeypatch.setattr(device, "HAS_CUDA", True)
    monkeypatch.setattr(device.distributed, name, lambda *args, group: called.append(group))
    called = []
    getattr(device, name)([], torch.ones(1), "group")
    assert called == ["group"]


# -- triton ------------------------------------------------------------------------------------


@pytest.fixture
def no_triton(monkeypatch):
    for name in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, None)


def test_an_installed_triton_is_passed_on(monkeypatch):
    language = types.ModuleType("triton.language")
    triton = types.ModuleType("triton")
    triton.language, triton.__path__ = language, []
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    assert device.triton is triton
    assert device.triton_language is language


def test_without_triton_kernels_define_and_do_not_launch(no_triton):
    from mqo.megatron.device import triton
    from mqo.megatron.device import triton_language as tl

    @triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["n"])
    @triton.jit
    def kernel(x, n: tl.constexpr):
        return tl.load(x + tl.arange(0, n))

    with pytest.raises(ModuleNotFoundError, match="Triton"):
        kernel[(1,)](random.random(), 1)


def test_the_module_has_no_other_names():
    with pytest.raises(AttributeError, match="'tritium'"):
        device.tritium  # noqa: B018 - it raises
