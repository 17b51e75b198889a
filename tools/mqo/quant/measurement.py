"""How well an operand was quantized: sums that add up over calls and ranks, and what they say."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mqo.quant.formats import SCALE_EXPONENT_MAX, SCALE_EXPONENT_MIN, SCALE_EXPONENT_NAN, Minifloat
from mqo.quant.scales import Scales, exponent, scales_of, spread
from mqo.quant.spec import QuantSpec
from mqo.quant.tensor_amax import largest

# One bin for each exponent of a scale, the last one for NaN.
BINS = SCALE_EXPONENT_NAN - SCALE_EXPONENT_MIN + 1

T = TypeVar("T", bound=Any)  # with a `key`


class Sums(NamedTuple):
    """What is measured of a tensor, on its device.

    totals: float64 [signal, noise, elements, nonzero, underflowed, saturated]. amax: float64 [].
    scales: int64 [BINS], blocks by the exponent of their scale.
    """

    totals: Tensor
    amax: Tensor
    scales: Tensor

    def add(self, other: "Sums") -> "Sums":
        """Return the sums of both tensors together."""
        amax = torch.maximum(self.amax, other.amax)
        return Sums(self.totals + other.totals, amax, self.scales + other.scales)

    def flat(self) -> Tensor:
        """Return all numbers in a row, float64, to be fetched at once (`Measurement.of`)."""
        return torch.cat((self.totals, self.amax.reshape(1), self.scales.double()))


@torch.no_grad()
def measure(
    original: Tensor, quantized: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None = None
) -> Sums:
    """Measure a tensor that `fake_quantize` was given so; waits for no device."""
    moved = original.movedim(axis, -1) if original.dim() and spec.block else original
    scales = scales_of(moved, spec, amax)
    nonzero = original != 0
    counts = (
        nonzero.sum(),
        (nonzero & (quantized == 0)).sum(),
        _saturated(moved, spec, scales),
    )
    elements = torch.full((), original.numel(), dtype=torch.float64, device=original.device)
    numbers = [*_energies(original, quantized), elements, *(c.double() for c in counts)]
    return Sums(torch.stack(numbers), largest(original).double(), _histogram(scales, spec))


def _energies(original: Tensor, quantized: Tensor) -> Tensor:
    """Return [sum x², sum (x - q)²] in float64, on the tensors' device."""
    # The norm widens element by element: no float64 copy of an s x s score matrix is made.
    error = original.float() - quantized.float()
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (original, error)]
    return torch.stack(norms).square()


def _saturated(x: Tensor, spec: QuantSpec, scales: Scales) -> Tensor:
    """Count the magnitudes beyond the largest finite value under their scale."""
    element = spec.format.element
    limit = element.max_value if isinstance(element, Minifloat) else 2.0**element.max_exponent
    encode = spread(scales.encode.float(), scales.run, x.shape[-1] if x.dim() else 1)
    # A block without a scale is lost, not saturated: NaN is not larger.
    return ((x.float() * encode).abs() > limit).sum()


def _histogram(scales: Scales, spec: QuantSpec) -> Tensor:
    # Not bincount, which waits for the device to learn how many bins there are.
    decode = scales.decode.flatten()
    bins = torch.zeros(BINS, dtype=torch.int64, device=decode.device)
    if spec.format.scale == "none" and not spec.tensor_scale:
        return bins
    found = exponent(decode).clamp(SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX)
    found = torch.where(decode.isnan(), SCALE_EXPONENT_NAN, found) - SCALE_EXPONENT_MIN
    return bins.scatter_add_(0, found, torch.ones_like(found))


_SUMS = ("signal", "noise", "elements", "nonzero", "underflowed", "saturated")


@dataclass(frozen=True)
class Measurement:
    """One operand of one layer's GEMM in one step, all its calls together.

    `signal` and `noise` are sums of x² and (x - q)². `underflowed` counts nonzero elements that
    became zero, `saturated` those beyond the format's largest value under their block's scale.
    `scales` counts blocks by the exponent of their scale, 128 for NaN; empty without scales.
    """

    site: str
    layer: str
    operand: str
    quant_type: str
    signal: float
    noise: float
    elements: float
    nonzero: float
    underflowed: float
    saturated: float
    amax: float
    scales: Mapping[int, int]

    @classmethod
    def of(cls, key: tuple[str, str, str, str], flat: list[float]) -> "Measurement":
        """Make one of (site, layer, operand, type) and of the numbers of `Sums.flat`."""
        *numbers, amax = flat[:-BINS]
        sums: dict[str, Any] = dict(zip(_SUMS, numbers, strict=True))
        counts = enumerate(flat[-BINS:], SCALE_EXPONENT_MIN)
        scales = {exponent: int(count) for exponent, count in counts if count}
        return cls(*key, **sums, amax=amax, scales=scales)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is about: site, layer, operand, type."""
        return (self.site, self.layer, self.operand, self.quant_type)

    @property
    def sqnr_db(self) -> float | None:
        """As `decibels` of signal and noise."""
        return decibels(self.signal, self.noise)

    @property
    def underflow(self) -> float:
        """The share of the nonzero elements that became zero, 0 .. 1."""
        return self.underflowed / self.nonzero if self.nonzero else 0.0

    @property
    def saturation(self) -> float:
        """The share of all elements that exceed the largest value, 0 .. 1."""
        return self.saturated / self.elements if self.elements else 0.0


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal / noise), dB: inf without noise, None without a signal to measure."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if signal == 0:
        return None
    if noise == 0:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise))


def merge_measurements(ranks: Iterable[Iterable[Measurement]]) -> list[Measurement]:
    """Put those of several ranks together: one for each key, sorted; amax the largest, sums add."""
    return merged(ranks, _add)


def merged(ranks: Iterable[Iterable[T]], add: Callable[[T, T], T]) -> list[T]:
    """Put what several ranks have together: one for each `key`, sorted by it."""
    found: dict[tuple[str, str, str, str], T] = {}
    for one in (one for rank in ranks for one in rank):
        found[one.key] = add(found[one.key], one) if one.key in found else one
    return [found[key] for key in sorted(found)]


def _add(one: Measurement, two: Measurement) -> Measurement:
    sums: dict[str, Any] = {name: getattr(one, name) + getattr(two, name) for name in _SUMS}
    exponents = sorted(one.scales.keys() | two.scales.keys())
    scales = {e: one.scales.get(e, 0) + two.scales.get(e, 0) for e in exponents}
    amax = math.nan if math.isnan(one.amax + two.amax) else max(one.amax, two.amax)
    return Measurement(*one.key, **sums, amax=amax, scales=scales)
