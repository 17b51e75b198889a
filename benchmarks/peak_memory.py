"""By how much something raises the peak of this process's memory, as Linux counts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def raised_bytes(run: Callable[[], object]) -> int:
    """Return by how many bytes the peak of a run is above what the process holds before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _peak_bytes()
    run()
    return _peak_bytes() - before


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
