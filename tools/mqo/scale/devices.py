"""Read devices.toml: GPUs for plans and simulations of other machines."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mqo.matrix.tables import NONE, pick

GIB = 1 << 30


class NativeRate(BaseModel):
    """The dense peak rate of GEMMs whose operands have one of these formats."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tflops: float
    formats: tuple[str, ...]
    source: str


class Device(BaseModel):
    """A GPU: its memory and peak rates; devices.toml explains each figure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_gib: float
    bf16_tflops: float
    memory_gbs: float
    link_gbs: float
    network_gbs: float
    source: str
    native: tuple[NativeRate, ...] = ()

    @property
    def memory(self) -> int:
        """Return the memory in bytes."""
        return int(self.memory_gib * GIB)

    def native_rate(self, quant_type: str) -> NativeRate | None:
        """Return the rate of GEMMs in a format; None if the GPU does not compute in it."""
        return next((rate for rate in self.native if quant_type in rate.formats), None)

    def tflops(self, quant_type: str) -> float:
        """Return the peak TFLOP/s in a format that the GPU computes in; 'none' is bf16."""
        rate = self.native_rate(quant_type)
        assert rate or quant_type == NONE, f"no rate for {quant_type}"
        return rate.tflops if rate else self.bf16_tflops


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
