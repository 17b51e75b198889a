"""The accelerator facade: torch.cuda itself with CUDA, a substitute without effect on a CPU.

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
    """Replaces a stream, an event, a graph or a context manager. Every call does nothing.

    Methods that return a state (`query`, `elapsed_time`) answer as if the work had finished.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Take what the real one takes."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def query(self) -> bool:
        """Return whether the work is done: it always is."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Return the milliseconds between two events: none are measured."""
        return 0.0

    def record_event(self, event: object = None) -> object:
        """Return an event on this stream."""
        return event or Event()


class Stream(_Inert):
    """A stream on a machine that has one queue: the program's own, so that all are the same."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)


class Event(_Inert):
    """A point in that queue."""


class CpuFacade:
    """torch.cuda's interface for a machine without CUDA.

    Names that are not defined here fall back to torch.cuda's, so that classes and annotations
    resolve; calling one of those then fails as torch fails.
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

    # Code that reads these chooses its CPU path and does not capture graphs.
    is_available = is_initialized = is_current_stream_capturing = staticmethod(lambda: False)
    current_device = staticmethod(lambda: torch.device("cpu"))
    # One device a local rank, so that upstream's trainer sets up its process groups.
    device_count = staticmethod(lambda: max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    get_device_name = staticmethod(lambda device=None: "cpu")
    get_device_capability = staticmethod(lambda device=None: (0, 0))  # of no CUDA architecture
    device = stream = _Inert  # contexts in which nothing is switched

    def __init__(self) -> None:
        self.default_generators = (torch.default_generator,)
        self.random = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_stream(self, device: object = None) -> _Inert:
        """Return the one queue there is."""
        return Stream(device)

    default_stream = current_stream

    def synchronize(self, device: object = None) -> None:
        """Wait for nothing."""

    set_device = set_stream = empty_cache = init = synchronize
    reset_peak_memory_stats = reset_max_memory_allocated = ipc_collect = synchronize

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        """Return a device of no CUDA architecture, with the machine's memory in bytes."""
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

# All that upstream takes from these are CUDA kernels, and it takes them wherever they import. On a
# CPU they count as not installed, so that a run there is the same in every container. A module
# that is loaded already stays: it was asked for.
CUDA_PACKAGES = ("apex", "transformer_engine")
if not HAS_CUDA:
    for _name in CUDA_PACKAGES:
        sys.modules.setdefault(_name, None)  # type: ignore[arg-type]


def accelerator_type() -> str:
    """Return the device type to put tensors on: "cuda" or "cpu"."""
    return "cuda" if HAS_CUDA else "cpu"


def accelerator_device(*address: Any) -> torch.device:
    """Return `torch.device(*address)` on CUDA; without CUDA the CPU, whatever the index."""
    return torch.device(*address) if HAS_CUDA else torch.device("cpu")


def accelerator_tensor_type(name: str) -> str:
    """Return what `Tensor.type()` says here for `name`, e.g. "torch.cuda.FloatTensor"."""
    return name if HAS_CUDA else name.replace("torch.cuda.", "torch.")


def all_gather(parts: list[Tensor], own: Tensor, group: ProcessGroup) -> None:
    """Call `torch.distributed.all_gather`; gloo wants equal parts, here they may differ."""
    if HAS_CUDA:
        distributed.all_gather(parts, own, group=group)
        return
    parts[group.rank()].copy_(own)
    for rank, part in enumerate(parts):
        distributed.broadcast(part, distributed.get_global_rank(group, rank), group=group)


def reduce_scatter(own: Tensor, parts: list[Tensor], group: ProcessGroup) -> None:
    """Call `torch.distributed.reduce_scatter`; gloo wants equal parts, here they may differ."""
    if HAS_CUDA:
        distributed.reduce_scatter(own, parts, group=group)
        return
    whole = torch.cat(parts)
    distributed.all_reduce(whole, group=group)
    own.copy_(whole.split([len(part) for part in parts])[group.rank()])


class _AbsentTriton:
    """Takes the place of triton where it is not installed: kernels define, and cannot launch."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> Self:
        return self

    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise ModuleNotFoundError(
            "this code path launches a Triton kernel; triton is not installed"
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
