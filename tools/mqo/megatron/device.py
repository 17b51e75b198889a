"""The accelerator facade: torch.cuda itself with CUDA, an inert substitute on a CPU.

The `portable_device` patch makes upstream use this module instead of torch.cuda. On a machine with
CUDA every name here is torch's own object, so nothing changes there.
"""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import psutil
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


class _Inert:
    """Replace a stream, an event, a graph or a context manager. Calls do nothing.

    Methods that return a state (`query`, `elapsed_time`) report finished work.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept any arguments."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def query(self) -> bool:
        """Return whether the work is done: always True."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Return 0 milliseconds: nothing is measured."""
        return 0.0

    def record_event(self, event: object = None) -> object:
        """Return an event on this stream."""
        return event or Event()


class Stream(_Inert):
    """A stream on a machine without streams; any two compare equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)


class Event(_Inert):
    """An event in that queue."""


class CpuFacade:
    """torch.cuda's interface for a machine without CUDA.

    Other names fall back to torch.cuda's, so that classes and annotations resolve. Calling one of
    those fails as in torch.
    """

    Stream = Stream
    Event = Event
    StreamContext = _Inert
    nvtx = _Inert()
    # Seeding and RNG state are those of the CPU generator.
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    manual_seed = staticmethod(lambda seed: torch.manual_seed(seed))
    manual_seed_all = manual_seed
    initial_seed = staticmethod(lambda: torch.initial_seed())

    # With these values code chooses its CPU path and captures no graphs.
    is_available = is_initialized = is_current_stream_capturing = staticmethod(lambda: False)
    current_device = staticmethod(lambda: torch.device("cpu"))
    # One device per local rank, because upstream's trainer needs it for its process groups.
    device_count = staticmethod(lambda: max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    get_device_name = staticmethod(lambda device=None: "cpu")
    get_device_capability = staticmethod(lambda device=None: (0, 0))  # not a CUDA architecture
    device = stream = _Inert  # contexts without effect

    def __init__(self) -> None:
        self.default_generators = (torch.default_generator,)
        self.random = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_stream(self, device: object = None) -> _Inert:
        """Return the only queue."""
        return Stream(device)

    default_stream = current_stream

    def synchronize(self, device: object = None) -> None:
        """Do nothing: all work is done."""

    set_device = set_stream = empty_cache = init = synchronize
    reset_peak_memory_stats = reset_max_memory_allocated = ipc_collect = synchronize

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        """Return a device without a CUDA architecture, with the machine's memory in bytes."""
        return SimpleNamespace(
            name=self.get_device_name(device),
            major=0,
            minor=0,
            multi_processor_count=os.cpu_count() or 1,
            total_memory=psutil.virtual_memory().total,
        )

    def memory_allocated(self, device: object = None) -> int:
        """Return the resident memory of this process, in bytes."""
        return psutil.Process().memory_info().rss

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """Return what upstream's trainer reports: resident bytes, and no allocation counts."""
        rss = self.memory_allocated(device)
        keys = ("reserved_bytes.all.", "allocated_bytes.all.")
        sizes = {key + when: rss for key in keys for when in ("current", "peak")}
        return {**sizes, "allocation.all.current": 0, "num_alloc_retries": 0}


HAS_CUDA = torch.cuda.is_available()
accelerator = torch.cuda if HAS_CUDA else CpuFacade()

# Upstream uses CUDA kernels of these packages whenever they import. On a CPU they count as not
# installed, so that a run there is the same in every container. A module that is already loaded
# stays.
CUDA_PACKAGES = ("apex", "transformer_engine")
if not HAS_CUDA:
    for _name in CUDA_PACKAGES:
        sys.modules.setdefault(_name, None)  # type: ignore[arg-type]


def accelerator_type() -> str:
    """Return the device type to put tensors on: "cuda" or "cpu"."""
    return "cuda" if HAS_CUDA else "cpu"


def accelerator_device(*address: Any) -> torch.device:
    """Return `torch.device(*address)` on CUDA; without CUDA always the CPU."""
    return torch.device(*address) if HAS_CUDA else torch.device("cpu")


def accelerator_tensor_type(name: str) -> str:
    """Return this machine's `Tensor.type()` for CUDA's `name`, such as "torch.cuda.FloatTensor"."""
    return name if HAS_CUDA else name.replace("torch.cuda.", "torch.")


def all_gather(parts: list[Tensor], own: Tensor, group: ProcessGroup) -> None:
    """Gather as torch's `all_gather`; on gloo, `parts` may differ in size."""
    if HAS_CUDA:
        distributed.all_gather(parts, own, group=group)
        return
    parts[group.rank()].copy_(own)
    for rank, part in enumerate(parts):
        distributed.broadcast(part, distributed.get_global_rank(group, rank), group=group)


def reduce_scatter(own: Tensor, parts: list[Tensor], group: ProcessGroup) -> None:
    """Sum and scatter as torch's `reduce_scatter`; on gloo, `parts` may differ in size."""
    if HAS_CUDA:
        distributed.reduce_scatter(own, parts, group=group)
        return
    whole = torch.cat(parts)
    distributed.all_reduce(whole, group=group)
    own.copy_(whole.split([len(part) for part in parts])[group.rank()])


class _AbsentTriton:
    """Replace triton if it is not installed: kernels can be defined, but not launched."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> Self:
        return self

    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise ModuleNotFoundError(
            "This code path launches a Triton kernel, and triton is not installed"
        )


def __getattr__(name: str) -> Any:
    """Import `triton` and `triton_language` only when a file uses them."""
    if name not in ("triton", "triton_language"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import triton
        import triton.language
    except ImportError:
        return _AbsentTriton()
    return triton if name == "triton" else triton.language
