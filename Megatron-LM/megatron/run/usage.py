"""What a run's processes used of their machine: device.json."""

import json
import resource
from pathlib import Path

from megatron.device import HAS_CUDA, accelerator


def peak_memory() -> int:
    """The most memory that this process held, in bytes: on its GPU, else resident on the CPU."""
    if HAS_CUDA:
        return accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def write_usage(path: Path, peaks: list[int]) -> None:
    """The device that this rank ran on, "cpu" or a GPU's name, and each rank's peak in bytes."""
    table = {"device": accelerator.get_device_name(), "peak_memory": peaks}
    path.write_text(json.dumps(table, indent=1), encoding="utf-8")
