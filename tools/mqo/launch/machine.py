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
    return Machine(len(os.sched_getaffinity(0)), _cuda_devices() if torch_cuda() else 0)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's name, as Linux has it; None where it has none."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)", text, re.MULTILINE)
    return found[1].strip() if found else None


def torch_cuda() -> str | None:
    """The CUDA release that torch was built for ("13.0"), read from its version file.

    None for a CPU build, and without torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", version, re.MULTILINE)
    return found[1] if found else None


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
