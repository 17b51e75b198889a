"""Count and measure the quantizer's calls, by site, layer, operand and type."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mqo.quant.formats import SITES
from mqo.quant.gradient_noise import GradientSample
from mqo.quant.measurement import Measurement, Sums, decibels, measure
from mqo.quant.operand_table import WGRAD
from mqo.quant.rounded import Rounded
from mqo.quant.spec import QuantSpec

# Replaces the quant type in the records of a layer that the run leaves unquantized.
EXCLUDED = "excluded"
GRADIENT = "gradient"  # the product of wgrad, in its records

Key = tuple[str, str, str, str]
# The position of a part: the whole operand's shape, and the matrix and row where the part begins.
Within = tuple[torch.Size, tuple[int, int]]


@dataclass(frozen=True)
class QuantRecord:
    """The calls and the error of one operand of one layer's GEMM.

    `quant_type` is EXCLUDED for a layer that the run excludes; its calls were not quantized.
    `signal` and `noise` are sums of x² and (x - q)² over the `measured` ones of the `calls`. A
    recomputed forward pass counts again.
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
    def key(self) -> Key:
        """Site, layer, operand and type."""
        return (self.site, self.layer, self.operand, self.quant_type)

    def add(self, other: "QuantRecord") -> "QuantRecord":
        """Return the record of both together."""
        names = ("calls", "measured", "signal", "noise")
        return QuantRecord(*self.key, *(getattr(self, n) + getattr(other, n) for n in names))

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise) in dB: inf without noise, None without a signal to measure."""
        return decibels(self.signal, self.noise)

    @property
    def noise_ratio(self) -> float | None:
        """The norm of the signal divided by that of the noise; None without a signal or noise."""
        return math.sqrt(self.signal / self.noise) if self.signal and self.noise else None


@dataclass
class _Tally:
    calls: int = 0
    measured: int = 0
    signal: float = 0.0
    noise: float = 0.0
    # The step that is being measured.
    step: Sums | None = None
    step_calls: int = 0


class Recorder:
    """Counts every quantized operand; measures and keeps operands in selected steps."""

    def __init__(self) -> None:
        self._tallies: dict[Key, _Tally] = {}
        self._dump: dict[str, Tensor] = {}
        self._gradients: dict[Key, GradientSample] = {}
        # Whether calls, and weight gradients, are measured now: the same on all ranks.
        self.measuring = self.has_gradients = False
        self.dumping = False  # whether operands are kept now
        self._partial: set[str] = set()  # the operands whose parts are kept

    def begin_step(
        self, iteration: int, every: int, dump: Collection[int], gradients: bool = False
    ) -> None:
        """Start an iteration, counted from 1. Measure 1 and each multiple of `every`, if not 0.

        Keep the operands of the iterations `dump`. `gradients`: also measure weight gradients.
        """
        self.measuring = bool(every) and (iteration == 1 or iteration % every == 0)
        self.has_gradients = gradients and self.measuring
        self.dumping = iteration in dump

    def observe(
        self,
        site: str,
        layer: str,
        operand: str,
        spec: QuantSpec,
        axis: int,
        original: Tensor,
        rounded: Rounded,
        dump: Tensor | None = None,
        calls: int = 1,
        within: Within | None = None,
    ) -> None:
        """Count a call, and measure it if its step is measured, without waiting for the device.

        A dumped step keeps `dump` instead of `original`,
        which was computed from it. If an operand comes in parts, one part counts as the call, the
        others as 0 `calls`, and `within` is the position of the part.
        """
        tally = self.count(site, layer, operand, spec.quant_type, calls)
        if self.measuring:
            sums = measure(original, rounded.value(), spec, axis, rounded.amax)
            if not calls and not spec.block:  # the first part counted the operand's only scale
                sums = sums._replace(scales=torch.zeros_like(sums.scales))
            tally.step = sums if tally.step is None else tally.step.add(sums)
            tally.step_calls += calls
        if self.dumping:
            name, kept = f"{site}/{layer}/{operand}", original if dump is None else dump
            if within is None:
                self._keep(name, kept)
            else:
                self._keep_part(name, kept, within, first=calls > 0)

    def count(self, site: str, layer: str, operand: str, quant_type: str, calls: int = 1) -> _Tally:
        """Count calls without measuring them, and return their tally."""
        tally = self._tallies.setdefault((site, layer, operand, quant_type), _Tally())
        tally.calls += calls
        return tally

    def observe_gradient(self, layer: str, quant_type: str, sample: GradientSample) -> None:
        """Add the sample of one micro-batch's weight gradient to that of its layer."""
        key = (WGRAD, layer, GRADIENT, quant_type)
        known = self._gradients.get(key)
        self._gradients[key] = sample if known is None else known.add(sample)

    def take_gradients(self) -> list[QuantRecord]:
        """Return this step's weight gradients, once: `signal` without noise, and the noise."""
        self.has_gradients = False
        samples, self._gradients = sorted(self._gradients.items()), {}
        if not samples:
            return []
        rows = torch.stack([sample.energies() for _, sample in samples]).tolist()
        return [QuantRecord(*key, 1, 1, *row) for (key, _), row in zip(samples, rows, strict=True)]

    def _keep(self, name: str, original: Tensor) -> None:
        """Keep the operand of the first call of a step; other micro-batches add nothing."""
        if name not in self._dump:
            self._dump[name] = original.detach().to("cpu", copy=True).contiguous()

    def _keep_part(self, name: str, part: Tensor, within: Within, first: bool) -> None:
        """Keep a part of the first call, with zeros for missing parts; `first` begins the call."""
        shape, (matrix, row) = within
        if first:
            (self._partial.discard if name in self._dump else self._partial.add)(name)
            self._dump.setdefault(name, torch.zeros(shape, dtype=part.dtype))
        if name in self._partial:
            matrices, rows, size = part.shape
            self._dump[name][matrix : matrix + matrices, row : row + rows, :size] = part

    def end_step(self) -> list[Measurement]:
        """Return the measurements since `begin_step`, and stop measuring; wait for the device.

        The measurements are added to the totals, too.
        """
        self.measuring = False
        measured = [(key, tally, tally.step) for key, tally in self._sorted() if tally.step]
        if not measured:
            return []
        # A single transfer for all.
        rows = torch.stack([step.flat() for _, _, step in measured]).tolist()
        measurements = []
        for (key, tally, _), row in zip(measured, rows, strict=True):
            measurements.append(Measurement.from_sums(key, row))
            tally.signal += measurements[-1].signal
            tally.noise += measurements[-1].noise
            tally.measured += tally.step_calls
            tally.step, tally.step_calls = None, 0
        return measurements

    def take_dump(self) -> dict[str, Tensor]:
        """Return {site/layer/operand: unquantized operand} of a dumped step, once."""
        self.dumping = False
        kept, self._dump = self._dump, {}
        return kept

    def record_excluded(self, site: str, layer: str) -> None:
        """Count one call of both operands of an excluded layer."""
        for operand in (SITES[site].lhs, SITES[site].rhs):
            self.count(site, layer, operand, EXCLUDED)

    def entries(self) -> list[QuantRecord]:
        """Return all records, sorted by key; measurements count after `end_step`."""
        return [
            QuantRecord(*key, tally.calls, tally.measured, tally.signal, tally.noise)
            for key, tally in self._sorted()
        ]

    def _sorted(self) -> list[tuple[Key, _Tally]]:
        return sorted(self._tallies.items(), key=lambda item: item[0])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude this block from all counts, measurements and dumps."""
        kept = dict(vars(self))
        self.reset()
        try:
            yield
        finally:
            vars(self).update(kept)

    def reset(self) -> None:
        """Delete all records."""
        vars(self).update(vars(Recorder()))


RECORDER = Recorder()
