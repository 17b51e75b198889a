"""Detect the machine's cores and GPUs without importing torch."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.process import run
from mqo.scale import devices

THREADS = "OMP_NUM_THREADS"
# The module of apex.
_ACCUMULATION = "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True)
class Machine:
    """CPU cores, and CUDA devices that the installed torch can use (0 for a CPU build).

    `device` and `memory`, in bytes, are those of the device with the least memory. `accumulation`
    is the module that would add up weight gradients on them.
    """

    cores: int
    gpus: int
    memory: int = 0
    device: str = ""
    accumulation: str = ""

    @property
    def has_cuda(self) -> bool:
        """Return whether runs use GPUs."""
        return self.gpus > 0

    @property
    def accumulates(self) -> bool:
        """Return whether `accumulation` imports. The check starts a process, for some seconds."""
        return bool(self.accumulation) and _imports(self.accumulation)


def detect() -> Machine:
    """Return this machine."""
    cores = len(os.sched_getaffinity(0))
    gpus = _cuda_devices() if torch_cuda() else []
    if not gpus:
        return Machine(cores, 0)
    return Machine(cores, len(gpus), *min(gpus), accumulation=_ACCUMULATION)


def imagined(device: str, gpus: int) -> Machine:
    """Return a machine with these devices and this one's cores; UnknownNameError lists devices."""
    return Machine(detect().cores, gpus, devices.device(device).memory, device)


def threads(share: int) -> str:
    """Return OMP_NUM_THREADS of a process: the user's value, or else its share of the cores."""
    own = os.environ.get(THREADS, "")
    return own if own.isdecimal() else str(share)


@functools.cache
def _imports(module: str) -> bool:
    """Return whether a module that needs torch's libraries is installed and imports."""
    if importlib.util.find_spec(module) is None:
        return False
    return run([sys.executable, "-c", f"import torch, {module}"]).returncode == 0


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the processor's name from /proc/cpuinfo; None if it is not there."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)", text, re.MULTILINE)
    return match[1].strip() if match else None


def torch_cuda() -> str | None:
    """Return the CUDA release that torch was built for ("13.0"), read from its version file.

    None for a CPU build, and without torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", version, re.MULTILINE)
    return match[1] if match else None


def _cuda_devices() -> list[tuple[int, str]]:
    """Return (bytes, name) of the CUDA devices that CUDA_VISIBLE_DEVICES allows."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    return devices_of(driver)


def devices_of(driver: Any) -> list[tuple[int, str]]:
    """Return (bytes, name) of the devices of libcuda; an empty list if it cannot be initialized."""
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    gpus = []
    for number in range(count.value):
        device, memory = ctypes.c_int(0), ctypes.c_size_t(0)
        name = ctypes.create_string_buffer(100)
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        driver.cuDeviceGetName(name, len(name), device)
        gpus.append((memory.value, name.value.decode(errors="replace")))
    return gpus
