"""Error statistics of quantized operands, summed over calls and ranks."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mqo.quant.formats import SCALE_EXPONENT_MAX, SCALE_EXPONENT_MIN, SCALE_EXPONENT_NAN
from mqo.quant.scales import Scales, blocks_of, exponent, scales_of
from mqo.quant.spec import QuantSpec
from mqo.quant.strides import flat, is_dense, memory_order
from mqo.quant.tensor_amax import largest

# One bin for each exponent of a scale, the last one for NaN.
BINS = SCALE_EXPONENT_NAN - SCALE_EXPONENT_MIN + 1
_LANES = 128  # of int64, at most 255
_ROW, _LEAST = 128, 1e-12  # elements of a row, and the least norm of the largest one

T = TypeVar("T", bound=Any)  # with a `key` and a method `add`


class Sums(NamedTuple):
    """The sums of a tensor, on its device.

    totals: float64 [signal, noise, rounded, elements, nonzero, underflowed, saturated], where
    rounded is the sum of q². amax: float64 [].
    scales: int64 [BINS], the number of blocks by the exponent of their scale.
    """

    totals: Tensor
    amax: Tensor
    scales: Tensor

    def add(self, other: "Sums") -> "Sums":
        """Return the sums of both tensors together."""
        amax = torch.maximum(self.amax, other.amax)
        return Sums(self.totals + other.totals, amax, self.scales + other.scales)

    def flat(self) -> Tensor:
        """Concatenate all numbers, float64, for a single transfer (`Measurement.from_sums`)."""
        return torch.cat((self.totals, self.amax.reshape(1), self.scales.double()))


@torch.no_grad()
def measure(
    original: Tensor, quantized: Tensor, spec: QuantSpec, axis: int, amax: Tensor | None = None
) -> Sums:
    """Return the sums over `original` and `quantized`, without synchronizing with the device.

    `quantized` is the result of `fake_quantize(original, spec, axis, amax=amax)`.
    """
    if spec.plugin is None:
        moved = original.movedim(axis, -1) if spec.block else original
        scales = scales_of(moved, spec, amax)
        saturated, histogram = _saturated(moved, spec, scales), _histogram(scales, spec)
    else:  # its scales are not known
        saturated = torch.zeros((), dtype=torch.int64, device=original.device)
        histogram = torch.zeros(BINS, dtype=torch.int64, device=original.device)
    nonzero, kept = original.bool(), quantized.bool()  # faster than comparisons with 0
    total = count_true(nonzero)
    counts = (total, total - count_true(nonzero & kept), saturated)
    elements = torch.full((), original.numel(), dtype=torch.float64, device=original.device)
    numbers = [*_energies(original, quantized), elements, *(c.double() for c in counts)]
    return Sums(torch.stack(numbers), largest(original).double(), histogram)


def _energies(original: Tensor, quantized: Tensor) -> Tensor:
    """Return [sum x², sum (x - q)², sum q²] in float64, on the tensors' device."""
    original, quantized = original.float(), quantized.float()
    return torch.stack([_energy(x) for x in (original, original - quantized, quantized)])


def _energy(x: Tensor) -> Tensor:
    """Return sum x² in float64, of float32 numbers.

    On a CPU, float32 norms of rows take a quarter of the time of a float64 norm. Their rounding
    errors are independent, so that those of the sum are below 1e-7.
    """
    size = x.numel() - x.numel() % _ROW
    if size and x.device.type == "cpu" and is_dense(x):
        row = flat(x)
        norms: Tensor = torch.linalg.vector_norm(row[:size].view(-1, _ROW), dim=1).double()
        if _LEAST < norms.amax() < 1 / _LEAST:  # else squares may overflow, or all vanish
            rest: Tensor = torch.linalg.vector_norm(row[size:], dtype=torch.float64)
            return norms.square().sum() + rest.square()
    # The norm converts element by element, without a float64 copy of an s x s score matrix.
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def _saturated(x: Tensor, spec: QuantSpec, scales: Scales) -> Tensor:
    """Count the magnitudes beyond the largest finite value under their scale."""
    limit = spec.format.element.max_value
    runs, encode = x.float(), scales.encode.float()
    if scales.run is not None:
        runs = blocks_of(runs, scales.run)
        order = memory_order(runs)  # in which products are fast
        runs, encode = runs.permute(order), encode.unsqueeze(-1).permute(order).contiguous()
    magnitudes = (runs * encode).abs_()
    # A block without a scale does not count as saturated: comparisons with NaN are false.
    return count_true(magnitudes.gt_(limit).bool())


def count_true(mask: Tensor) -> Tensor:
    """Return the number of true elements, int64 [], on the mask's device.

    On a CPU this takes a tenth of the time of count_nonzero: eight bytes are summed as one int64,
    over so few rows that no byte carries into the next.
    """
    size = mask.numel() - mask.numel() % (8 * _LANES)
    if size == 0 or mask.device.type != "cpu" or not is_dense(mask) or mask.storage_offset() % 8:
        return torch.count_nonzero(mask)
    row = flat(mask)
    sums = row[:size].view(torch.int64).view(-1, _LANES).sum(1)
    return sums.view(torch.uint8).sum() + torch.count_nonzero(row[size:])


def _histogram(scales: Scales, spec: QuantSpec) -> Tensor:
    # Not bincount, which waits for the device to get the number of bins.
    decode = scales.decode.flatten()
    bins = torch.zeros(BINS, dtype=torch.int64, device=decode.device)
    if spec.format.scale == "none" and not spec.tensor_scale:
        return bins
    exponents = exponent(decode).clamp(SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX)
    exponents = torch.where(decode.isnan(), SCALE_EXPONENT_NAN, exponents) - SCALE_EXPONENT_MIN
    return bins.scatter_add_(0, exponents, torch.ones_like(exponents))


_SUMS = ("signal", "noise", "rounded", "elements", "nonzero", "underflowed", "saturated")


@dataclass(frozen=True)
class Measurement:
    """One operand of one layer's GEMM in one step, all its calls together.

    `signal`, `noise` and `rounded` are sums of x², (x - q)² and q². `underflowed` counts nonzero
    elements that became zero, `saturated` those beyond the format's largest value under their
    block's scale. `scales` counts blocks by the exponent of their scale, 128 for NaN; empty without
    scales.
    """

    site: str
    layer: str
    operand: str
    quant_type: str
    signal: float
    noise: float
    rounded: float
    elements: float
    nonzero: float
    underflowed: float
    saturated: float
    amax: float
    scales: Mapping[int, int]

    @classmethod
    def from_sums(cls, key: tuple[str, str, str, str], flat: list[float]) -> "Measurement":
        """Return the measurement of `key`, (site, layer, operand, type), from `Sums.flat`."""
        *numbers, amax = flat[:-BINS]
        sums: dict[str, Any] = dict(zip(_SUMS, numbers, strict=True))
        counts = enumerate(flat[-BINS:], SCALE_EXPONENT_MIN)
        scales = {exponent: int(count) for exponent, count in counts if count}
        return cls(*key, **sums, amax=amax, scales=scales)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Site, layer, operand and type."""
        return (self.site, self.layer, self.operand, self.quant_type)

    def add(self, other: "Measurement") -> "Measurement":
        """Return the measurement of both together: sums add, and the larger amax is kept."""
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        exponents = sorted(self.scales.keys() | other.scales.keys())
        scales = {e: self.scales.get(e, 0) + other.scales.get(e, 0) for e in exponents}
        amax = math.nan if math.isnan(self.amax + other.amax) else max(self.amax, other.amax)
        return Measurement(*self.key, **sums, amax=amax, scales=scales)

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR in dB, as `decibels` returns it."""
        return decibels(self.signal, self.noise)

    @property
    def bias(self) -> float:
        """The mean change of a value relative to it, weighted by x²: sum x (q - x) / sum x².

        0 for unbiased rounding; negative if rounding shrinks values.
        """
        # x (q - x) = (q² - x² - (x - q)²) / 2
        change = (self.rounded - self.signal - self.noise) / 2
        return change / self.signal if self.signal else 0.0

    @property
    def scale_spread(self) -> float | None:
        """The standard deviation of the exponents of scales, in powers of two; None without any."""
        counts = {e: count for e, count in self.scales.items() if e != SCALE_EXPONENT_NAN}
        total = sum(counts.values())
        if not total:
            return None
        mean = sum(e * count for e, count in counts.items()) / total
        return math.sqrt(sum(n * (e - mean) ** 2 for e, n in counts.items()) / total)

    @property
    def underflow(self) -> float:
        """The share of the nonzero elements that became zero, 0 .. 1."""
        return self.underflowed / self.nonzero if self.nonzero else 0.0

    @property
    def saturation(self) -> float:
        """The share of all elements that exceed the largest value, 0 .. 1."""
        return self.saturated / self.elements if self.elements else 0.0


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal / noise) in dB: None if signal is 0, otherwise inf if noise is 0."""
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if signal == 0:
        return None
    if noise == 0:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise))


def merge(ranks: Iterable[Iterable[T]]) -> list[T]:
    """Add up the measurements, or the records, of several ranks: one per key, sorted by key.

    Energies add, so the SQNR is that of the data of all ranks, not a mean of decibels.
    """
    result: dict[tuple[str, str, str, str], T] = {}
    for item in (item for rank in ranks for item in rank):
        result[item.key] = result[item.key].add(item) if item.key in result else item
    return [result[key] for key in sorted(result)]
