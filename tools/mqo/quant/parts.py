"""Quantize an operand part by part, with the same bits as quantizing the whole."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mqo.quant import head_tiles
from mqo.quant.backend import fake_quantize
from mqo.quant.finite import check_rounding
from mqo.quant.formats import NONE
from mqo.quant.quantization import Quantization
from mqo.quant.rounded import Rounded
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
    the last row.
    """

    quantization: Quantization
    key: tuple[str, str, str]
    spec: QuantSpec
    shape: tuple[int, int, int]
    seed: int | None = None
    amax: Tensor | None = None
    alpha: float | None = None
    axis: int = -1

    @property
    def block(self) -> int:
        """Elements that share a scale: a row may end at a multiple of it if only zeros follow."""
        return self.spec.block or 1 if self.axis == -1 or self._in_squares else 1

    @property
    def row_block(self) -> int:
        """Rows that share a scale: a part must have all of them."""
        return self.spec.block or 1 if self.axis == -2 or self._in_squares else 1

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

    def quantize(self, part: Tensor, matrix: int, row: int, out: Tensor) -> Tensor:
        """Quantize a part [m, r, n] that begins at this matrix and row into `out`; return `out`.

        Elements of a row that a part does not cover are zeros.
        """
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
        _, rows, size = self.shape
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
        if self._in_squares and self.quantization.recorder.measuring:
            measured, quantized = (head_tiles.whole_tiles(x, self.spec) for x in (part, quantized))
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
