"""Quantize slices of an operand that exists as a whole, with the same bits as the whole."""

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from mqo.quant.backend import fake_quantize
from mqo.quant.finite import check_rounding
from mqo.quant.hadamard import SignedHadamard
from mqo.quant.plugin_states import Operand
from mqo.quant.quantization import Quantization
from mqo.quant.rounded import Rounded
from mqo.quant.spec import QuantSpec, without_alpha


@dataclass(frozen=True)
class SliceRounding:
    """How slices of an operand are rounded, and recorded.

    key: site, layer and operand. amax: that of the whole operand, float32 [], for formats that
    scale by it. alpha: the scale of the tensor, if quantized slices exclude it. turn: the transform
    before rounding; `amax` is that of the transformed operand.
    """

    quantization: Quantization
    key: Operand
    spec: QuantSpec
    amax: Tensor | None = None
    alpha: float | None = None
    turn: SignedHadamard | None = None

    def quantize(self, part: Tensor, axis: int) -> Tensor:
        """Return a slice, quantized along `axis` in whole blocks, as a new contiguous tensor.

        A transform pads the axis.
        """
        spec = self.spec if self.alpha is None else without_alpha(self.spec)
        shape = self.turn.padded(part.shape, axis) if self.turn else part.shape
        out = torch.empty(shape, dtype=part.dtype, device=part.device)
        if self.turn:
            part = self.turn.apply(part, axis, out)
        return fake_quantize(part, spec, axis=axis, out=out, amax=self.amax)

    def observe(
        self, whole: Tensor, part: Tensor, quantized: Tensor, axis: int, is_first: bool
    ) -> None:
        """Check and record a slice of `whole`; the first one counts as the call."""
        if self.quantization.options.check_nan:
            check_rounding(*self.key, self.spec.quant_type, part, quantized)
        rounded = Rounded(quantized, self.amax, 1.0 if self.alpha is None else self.alpha)
        if self.turn and self.quantization.recorder.measuring:
            part = self.turn.apply(part, axis)
        self.quantization.recorder.observe(
            *self.key, self.spec, axis, part, rounded, dump=whole, calls=int(is_first)
        )


@dataclass(frozen=True)
class Sliced:
    """An operand to be rounded in slices; without `rounding` it is the product's operand itself.

    points: those of its transform, which it has had if `rounding` is None; 1 without one.
    """

    tensor: Tensor
    rounding: SliceRounding | None = None
    points: int = 1

    @property
    def block(self) -> int:
        """Elements that are rounded together: slices along this axis begin at multiples."""
        return lcm(self.rounding.spec.block or 1 if self.rounding else 1, self.points)
