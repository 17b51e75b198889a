"""What the machine offers a run, found out without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """CPU cores, and CUDA devices that the installed torch can use (0 for a CPU build)."""

    cores: int
    gpus: int

    @property
    def has_cuda(self) -> bool:
        """Whether runs go to GPUs."""
        return self.gpus > 0


def detect() -> Machine:
    """This machine."""
    return Machine(len(os.sched_getaffinity(0)), _cuda_devices() if _torch_has_cuda() else 0)


def _torch_has_cuda() -> bool:
    """Whether torch was built for CUDA, read from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*= *['\"]", version, re.MULTILINE) is not None


def _cuda_devices() -> int:
    """The driver's device count, under CUDA_VISIBLE_DEVICES as torch will see it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
