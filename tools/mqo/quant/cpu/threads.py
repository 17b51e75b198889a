"""Run a kernel in the threads of torch's OpenMP pool."""

import ctypes
from array import array
from collections.abc import Callable
from pathlib import Path

import torch

from mqo.quant.cpu.compile import Kernel


def launch(kernel: Kernel, units: int, grain: int, *entries: int) -> array:
    """Run `kernel` on `units` of work with a table of counter, units, grain and `entries`.

    Return the table. It uses up to torch.get_num_threads() threads of the pool of torch's
    operators: two pools would wait for each other's idle threads, which spin. Any number of Python
    threads may call it at once; each has its own table.
    """
    table = array("q", (0, units, grain, *entries))
    address, _ = table.buffer_info()
    threads = min(torch.get_num_threads(), -(-units // grain))
    if threads < 2 or _PARALLEL is None:
        kernel(address)
    else:
        _PARALLEL(kernel, address, threads, 0)
    return table


def _parallel() -> Callable[..., None] | None:
    """Return GOMP_parallel(function, argument, threads, flags) of torch's OpenMP, if it has one."""
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function = torch_library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.restype = None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint)
    return function


_PARALLEL = _parallel()
