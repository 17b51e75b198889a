"""The error of a tensor in several formats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS, check_choice, format_of
from mqo.quant.measurement import Measurement, measure
from mqo.quant.plugins import PLUGINS
from mqo.quant.spec import QuantSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class FormatError:
    """The error of one tensor in one format: `spec` has the format and its choices."""

    spec: QuantSpec
    measurement: Measurement

    @property
    def label(self) -> str:
        """The type, with its tile, and the choices that are not its defaults."""
        default = QuantSpec(self.spec.quant_type)
        names = ("scale_rule", "rounding", "overflow", "tensor_scale")
        others = [name for name in names if getattr(self.spec, name) != getattr(default, name)]
        words = [n if n == "tensor_scale" else str(getattr(self.spec, n)) for n in others]
        return " ".join([self.spec.quant_type, self.spec.tile_text, *words])


@dataclass(frozen=True)
class Comparison:
    """The errors of one tensor in several formats; `print` shows them as a table."""

    errors: tuple[FormatError, ...]

    def __str__(self) -> str:
        width = max(26, *(len(error.label) + 2 for error in self.errors))
        head = f"{'format':{width}}{'SQNR dB':>8}{'underflow %':>13}{'saturation %':>14}"
        return "\n".join([head, *(_line(error, width) for error in self.errors)])

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw a bar of the SQNR of each format, the best one first; needs matplotlib.

        Formats without a finite SQNR, in dB, have no bar.
        """
        if axes is None:
            import matplotlib.pyplot as plt

            height = 0.8 + 0.3 * len(self.errors)
            axes = plt.subplots(figsize=(6, height), layout="constrained")[1]
        bars = [(e.measurement.sqnr_db or float("nan"), e) for e in self.errors]
        bars = sorted((bar for bar in bars if abs(bar[0]) < float("inf")), key=lambda bar: bar[0])
        labels, values = [error.label for _, error in bars], [value for value, _ in bars]
        colors = [format_of(error.spec.quant_type).light for _, error in bars]
        bars_drawn = axes.barh(range(len(values)), values, color=colors)
        axes.bar_label(bars_drawn, fmt="%.1f", padding=3)
        axes.set_yticks(range(len(values)), labels)
        axes.set_xlabel("SQNR (dB)")
        axes.margins(x=0.1)
        return axes


def sqnr(x: Tensor, spec: QuantSpec | str, *, axis: int = -1, seed: int | None = None) -> float:
    """Return the signal-to-quantization-noise ratio of `x` in a format, in dB.

    It is 10 log10(sum x² / sum (x - q)²): inf without noise, NaN without a signal.

    Args:
        x: float32, bfloat16 or float16, of any shape.
        spec: the format, or its name.
        axis: the axis along which blocks run.
        seed: for stochastic rounding.

    Raises:
        TypeError, ValueError: those of `fake_quantize`.

    Examples:
        >>> x = torch.linspace(-4, 4, 1024)
        >>> [round(sqnr(x, name), 1) for name in ("mxfp8", "nvfp4", "mxfp4")]
        [29.9, 28.6, 18.7]
    """
    decibels = error_of(x, spec, axis=axis, seed=seed).measurement.sqnr_db
    return float("nan") if decibels is None else decibels


def compare_formats(
    x: Tensor,
    specs: Iterable[QuantSpec | str] | QuantSpec | str | None = None,
    *,
    axis: int = -1,
    seed: int | None = None,
) -> Comparison:
    """Return the errors of `x` in several formats, in their order.

    Args:
        x: float32, bfloat16 or float16, of any shape.
        specs: formats, or their names, or one; None for all formats, with their defaults.
        axis: the axis along which blocks run.
        seed: for stochastic rounding.

    Raises:
        TypeError, ValueError: those of `fake_quantize`.

    Examples:
        >>> print(compare_formats(torch.linspace(-4, 4, 1024), ["mxfp8", "nvfp4"]))
        format                     SQNR dB  underflow %  saturation %
        mxfp8 1x32                   29.93       0.0000       17.9688
        nvfp4 1x16                   28.57       0.1953       19.5312
    """
    if isinstance(specs, str | QuantSpec):
        specs = [specs]
    return Comparison(tuple(error_of(x, spec, axis=axis, seed=seed) for spec in specs or FORMATS))


def error_of(
    x: Tensor, spec: QuantSpec | str, *, axis: int, seed: int | None = None
) -> FormatError:
    """Return the error of `x` in one format; arguments and errors are those of `sqnr`."""
    spec = spec if isinstance(spec, QuantSpec) else QuantSpec(spec)
    check_choice("format", spec.quant_type, (*FORMATS, *PLUGINS))
    x = x.detach()
    sums = measure(x, fake_quantize(x, spec, axis=axis, seed=seed), spec, axis)
    key = ("", "", "", spec.quant_type)
    return FormatError(spec, Measurement.from_sums(key, sums.flat().tolist()))


def _line(error: FormatError, width: int) -> str:
    measurement = error.measurement
    decibels = "-" if measurement.sqnr_db is None else f"{measurement.sqnr_db:.2f}"
    shares = (measurement.underflow, measurement.saturation)
    underflow, saturation = (f"{100 * share:.4f}" for share in shares)
    return f"{error.label:{width}}{decibels:>8}{underflow:>13}{saturation:>14}"
