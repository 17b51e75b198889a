"""What the quantiser counts and measures of its own work, by site, layer, operand and type."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import current
from .sites import SITES

# Stands where a quant type would, in the records of a layer that the run leaves unquantised.
EXCLUDED = "excluded"


@dataclass(frozen=True)
class QuantRecord:
    """One operand of one layer's GEMM: how often it was quantised, and how well.

    `quant_type` EXCLUDED stands for a layer that the run leaves out; its calls were not quantised.
    `signal` and `noise` are sums of x² and (x - q)² over the `measured` of the `calls`. A forward
    pass that is recomputed for backward counts again.
    """

    site: str
    layer: str
    operand: str
    quant_type: str
    calls: int
    measured: int
    signal: float
    noise: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the record is about: site, layer, operand, type."""
        return (self.site, self.layer, self.operand, self.quant_type)

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise) in dB: inf without noise, None without a signal to measure."""
        if math.isnan(self.signal) or math.isnan(self.noise):
            return math.nan
        if self.signal == 0:
            return None
        if self.noise == 0:
            return math.inf
        return 10 * (math.log10(self.signal) - math.log10(self.noise))


@dataclass
class _Tally:
    calls: int = 0
    measured: int = 0
    energies: Tensor | None = None  # [signal, noise], float64, on the operand's device


class Recorder:
    """Counts every quantised operand, and measures the SQNR of every `sqnr_every`-th call.

    The first call of a key is measured, then one in `sqnr_every` (an option of the run).
    """

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str, str, str], _Tally] = {}

    def observe(
        self,
        site: str,
        layer: str,
        operand: str,
        quant_type: str,
        original: Tensor,
        quantised: Tensor,
    ) -> None:
        """Count one call, and measure it when its turn has come; never waits for the device."""
        tally = self._tallies.setdefault((site, layer, operand, quant_type), _Tally())
        every = current().sqnr_every
        if every and tally.calls % every == 0:
            energies = _energies(original, quantised)
            tally.energies = energies if tally.energies is None else tally.energies + energies
            tally.measured += 1
        tally.calls += 1

    def pass_over(self, site: str, layer: str) -> None:
        """Count one call of both operands of an excluded layer."""
        for operand in (SITES[site].lhs, SITES[site].rhs):
            self._tallies.setdefault((site, layer, operand, EXCLUDED), _Tally()).calls += 1

    def entries(self) -> list[QuantRecord]:
        """Return all records, sorted by key. Waits for the device."""
        records = []
        for key, tally in sorted(self._tallies.items(), key=lambda item: item[0]):
            signal, noise = (0.0, 0.0) if tally.energies is None else tally.energies.tolist()
            records.append(QuantRecord(*key, tally.calls, tally.measured, signal, noise))
        return records

    def reset(self) -> None:
        """Forget everything."""
        self._tallies.clear()


RECORDER = Recorder()


def merge(rank_entries: Iterable[Iterable[QuantRecord]]) -> list[QuantRecord]:
    """Add up the records of several ranks: one for each key, sorted by key.

    Energies add, so the SQNR is that of all ranks' data together, not a mean of decibels.
    """
    merged: dict[tuple[str, str, str, str], QuantRecord] = {}
    for record in (record for entries in rank_entries for record in entries):
        other = merged.get(record.key)
        merged[record.key] = record if other is None else _add(other, record)
    return [merged[key] for key in sorted(merged)]


def _add(one: QuantRecord, two: QuantRecord) -> QuantRecord:
    return QuantRecord(
        *one.key,
        calls=one.calls + two.calls,
        measured=one.measured + two.measured,
        signal=one.signal + two.signal,
        noise=one.noise + two.noise,
    )


@torch.no_grad()
def _energies(original: Tensor, quantised: Tensor) -> Tensor:
    """Return [sum x², sum (x - q)²] in float64, on the tensors' device."""
    # The norm widens element by element: no float64 copy of an s x s score matrix is made.
    error = original.float() - quantised.float()
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (original, error)]
    return torch.stack(norms).square()
