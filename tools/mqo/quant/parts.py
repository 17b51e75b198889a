"""Quantize an operand part by part, with the same bits as quantizing the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor

from mqo.quant import head_tiles
from mqo.quant.backend import fake_quantize, is_fake
from mqo.quant.finite import check_rounding
from mqo.quant.formats import NONE
from mqo.quant.hadamard import SignedHadamard
from mqo.quant.quantization import Quantization
from mqo.quant.rounded import Rounded
from mqo.quant.scales import alpha_of
from mqo.quant.spec import QuantSpec, without_alpha
from mqo.quant.stochastic import skipped
from mqo.quant.tensor_amax import largest


@dataclass(frozen=True)
class OperandParts:
    """Quantizes parts of an operand [matrices, rows, size] along its last axis, or its rows.

    key: site, layer and operand. shape: that of the whole operand. seed: for stochastic rounding.
    amax: that of the whole operand, float32 [], for formats that scale by it. alpha: the scale of
    the tensor, if quantized parts exclude it. axis: -1, or -2 for blocks along the rows. With
    these, and with squares, a part begins at a multiple of `row_block` rows, and ends at one or at
    the last row. turn: the transform along the axis before rounding; `amax` is that of the
    transformed operand, which is padded.
    """

    quantization: Quantization
    key: tuple[str, str, str]
    spec: QuantSpec
    shape: tuple[int, int, int]
    seed: int | None = None
    amax: Tensor | None = None
    alpha: float | None = None
    axis: int = -1
    turn: SignedHadamard | None = None

    @property
    def block(self) -> int:
        """Elements rounded together: a row may end at a multiple of it if only zeros follow."""
        return self._block(-1)

    @property
    def row_block(self) -> int:
        """Rows that are rounded together: a part must have all of them."""
        return self._block(-2)

    def _block(self, axis: int) -> int:
        scale = self.spec.block or 1 if self.axis == axis or self._in_squares else 1
        return lcm(scale, self.turn.hadamard.points if self.turn and self.axis == axis else 1)

    @property
    def _in_squares(self) -> bool:
        return self.spec.tile == "square"

    @property
    def needs_whole_rows(self) -> bool:
        """Whether parts must have whole rows, zeros too, since draws depend on the index."""
        return self.spec.rounding == "stochastic"

    @property
    def is_watched(self) -> bool:
        """Whether parts are now measured or kept, zeros too."""
        recorder = self.quantization.recorder
        return self.spec.quant_type != NONE and (recorder.measuring or recorder.dumping)

    @property
    def lacks_amax(self) -> bool:
        """Whether the format scales by an amax that is not known yet."""
        return self.spec.scales_by_tensor and self.amax is None

    def with_amax(self, amax: Tensor) -> OperandParts:
        """Return the same with the amax of the whole operand; wait for the device."""
        value = 1.0 if is_fake(amax) else amax.item()
        alpha = None if self.alpha is None else alpha_of(value, self.spec)
        return replace(self, amax=amax, alpha=alpha)

    def padded(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of a quantized part [..., r, n]."""
        return self.turn.padded(shape, self.axis) if self.turn else shape

    def turned(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a part after the transform, in `out` if it has one."""
        return self.turn.apply(part, self.axis, out) if self.turn else part

    def quantize(self, part: Tensor, matrix: int, row: int, out: Tensor) -> Tensor:
        """Quantize a part [m, r, n] that begins at this matrix and row into `out`; return `out`.

        Elements of a row that a part does not cover are zeros. `out` has the `padded` shape.
        """
        part = self.turned(part, out)
        if self.spec.quant_type == NONE:
            return part
        amax = self.amax
        spec = self.spec if self.alpha is None else without_alpha(self.spec)
        if amax is not None:
            amax = torch.maximum(amax, largest(part))  # propagate a NaN in formats without its code
        if self.seed is None and self._in_squares:
            return out.copy_(head_tiles.quantize_matrices(part, spec, None, amax))
        if self.seed is None:
            return fake_quantize(part, spec, axis=self.axis, out=out, amax=amax)
        _, rows, size = self.padded(self.shape)
        for i, (x, rounded) in enumerate(zip(part, out, strict=True)):
            seed = skipped(self.seed, ((matrix + i) * rows + row) * size)
            fake_quantize(x, spec, axis=self.axis, out=rounded, seed=seed, amax=amax)
        return out

    def observe(self, part: Tensor, quantized: Tensor, matrix: int, row: int) -> None:
        """Check and record a part; the first part counts as the call."""
        if self.spec.quant_type == NONE:
            return
        if self.quantization.options.check_nan:
            check_rounding(*self.key, self.spec.quant_type, part, quantized)
        measured = part
        if self.quantization.recorder.measuring:
            measured = self.turned(part)
            if self._in_squares:
                pair = measured, quantized
                measured, quantized = (head_tiles.whole_tiles(x, self.spec) for x in pair)
        self.quantization.recorder.observe(
            *self.key,
            self.spec,
            self.axis,
            measured,
            Rounded(quantized, self.amax, 1.0 if self.alpha is None else self.alpha),
            dump=part,
            calls=int(matrix == row == 0),
            within=(torch.Size(self.shape), (matrix, row)),
        )
