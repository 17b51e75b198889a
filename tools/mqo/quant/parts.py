"""Quantizes an operand part by part, to the bits that it would have as a whole."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mqo.quant.backend import fake_quantize
from mqo.quant.config import current
from mqo.quant.finite import check_rounding
from mqo.quant.formats import NONE
from mqo.quant.record import RECORDER
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import skipped
from mqo.quant.tensor_amax import largest


@dataclass(frozen=True)
class OperandParts:
    """An operand [matrices, rows, size] that is never whole: quantized along its last axis.

    place: site, layer and operand. shape: the whole operand's. seed: of stochastic rounding. amax:
    of the whole, float32 [], for formats that scale by it.
    """

    place: tuple[str, str, str]
    spec: QuantSpec
    shape: tuple[int, int, int]
    seed: int | None = None
    amax: Tensor | None = None

    @property
    def block(self) -> int:
        """Elements that share a scale: a row may be cut at multiples of it, where zeros follow."""
        return self.spec.block or 1

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a part must hold rows to their ends, zeros too: an element draws by its place."""
        return self.spec.rounding == "stochastic"

    @property
    def is_watched(self) -> bool:
        """Whether what is quantized is measured or kept now, zeros too."""
        return RECORDER.measuring or RECORDER.dumping

    def quantize(self, part: Tensor, matrix: int, row: int, out: Tensor) -> Tensor:
        """Write to `out`, and return, a part [m, r, n] that begins at this matrix and row.

        Elements of a row that a part does not cover are zeros.
        """
        if self.spec.quant_type == NONE:
            return part
        amax = self.amax
        if amax is not None:
            amax = torch.maximum(amax, largest(part))  # a NaN must not vanish where it has no code
        if self.seed is None:
            return fake_quantize(part, self.spec, out=out, amax=amax)
        _, rows, size = self.shape
        for i, (x, rounded) in enumerate(zip(part, out, strict=True)):
            seed = skipped(self.seed, ((matrix + i) * rows + row) * size)
            fake_quantize(x, self.spec, out=rounded, seed=seed, amax=amax)
        return out

    def observe(self, part: Tensor, quantized: Tensor, matrix: int, row: int) -> None:
        """Check and record a part; the first one counts as the call."""
        if self.spec.quant_type == NONE:
            return
        if current().check_nan:
            check_rounding(*self.place, self.spec.quant_type, part, quantized)
        RECORDER.observe(
            *self.place,
            self.spec,
            -1,
            part,
            quantized,
            self.amax,
            calls=int(matrix == row == 0),
            within=(torch.Size(self.shape), (matrix, row)),
        )
