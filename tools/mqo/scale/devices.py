"""GPUs, for plans and simulations of machines that are not there: devices.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mqo.matrix.tables import pick

GIB = 1 << 30


class Device(BaseModel):
    """A GPU: its memory, and its peak rates; devices.toml says what each figure is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_gib: float
    bf16_tflops: float
    memory_gbs: float
    link_gbs: float
    network_gbs: float
    source: str

    @property
    def memory(self) -> int:
        """Return its bytes."""
        return int(self.memory_gib * GIB)


def _read() -> dict[str, Device]:
    text = Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")
    return {name: Device(**row) for name, row in tomllib.loads(text).items()}


DEVICES = _read()


def device(name: str) -> Device:
    """Return a device; UnknownNameError lists the valid names."""
    return pick(DEVICES, "device", name)


def gib(size: float) -> str:
    """Return bytes as GiB."""
    return f"{size / GIB:.1f}"


def usable(memory: int) -> int:
    """Return the bytes that a plan may use: less a tenth, which the allocator cannot."""
    return memory * 9 // 10
