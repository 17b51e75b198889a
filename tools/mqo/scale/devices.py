"""Read devices.toml: GPUs for plans and simulations of other machines."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mqo.matrix.tables import pick

GIB = 1 << 30


class Device(BaseModel):
    """A GPU: its memory and peak rates; devices.toml explains each figure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_gib: float
    bf16_tflops: float
    memory_gbs: float
    link_gbs: float
    network_gbs: float
    source: str

    @property
    def memory(self) -> int:
        """Return the memory in bytes."""
        return int(self.memory_gib * GIB)


def _read() -> dict[str, Device]:
    text = Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")
    return {name: Device(**row) for name, row in tomllib.loads(text).items()}


DEVICES = _read()


def device(name: str) -> Device:
    """Return a device; UnknownNameError lists the valid names."""
    return pick(DEVICES, "device", name)


def gib(size: float) -> str:
    """Return a size in bytes as text in GiB."""
    return f"{size / GIB:.1f}"


def usable(memory: int) -> int:
    """Return the bytes that a plan may use: 90 %, as the allocator cannot use all."""
    return memory * 9 // 10
