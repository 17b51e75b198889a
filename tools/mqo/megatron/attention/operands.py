"""The operands of attention's products, taken by chunk.

An operand [s, b, heads, d] is viewed as one matrix for each group of heads of a sequence. It is
rounded before, or chunk by chunk, without a rounded copy of the whole.
"""

import torch
from torch import Tensor

from mqo.megatron.attention.chunks import Chunk
from mqo.quant.slices import Sliced


def by_matrix(heads: Tensor, groups: int) -> Tensor:
    """View [s, b, np, d] as [b * ng, np / ng, s, d]; a copy if the strides need one."""
    return heads.unflatten(2, (groups, -1)).flatten(1, 2).permute(1, 2, 0, 3)


class _Taken:
    """The parts of an operand, rounded along the features (axis -1) or the tokens (axis -2).

    Chunks come in the order of the plan, maybe twice; each part is recorded once.
    """

    def __init__(self, operand: Sliced, groups: int, axis: int) -> None:
        self._operand, self._axis = operand, axis
        self._matrices = by_matrix(operand.tensor, groups)
        self._recorded: tuple[int, int] | None = None

    @property
    def row_block(self) -> int:
        """The tokens that share a scale, at whose multiples a part begins."""
        return self._operand.block if self._axis == -2 else 1

    def _rounded(self, chunk: Chunk, rows: slice) -> Tensor:
        """Return the rows of a chunk's matrices, [matrices, heads, rows, d]."""
        part, rounding = self._matrices[chunk.first : chunk.last, :, rows], self._operand.rounding
        if rounding is None:
            return part
        quantized = rounding.quantize(part, self._axis)
        begin, before = (chunk.first, rows.start or 0), self._recorded
        if before is None or begin > before:
            rounding.observe(self._operand.tensor, part, quantized, self._axis, before is None)
            self._recorded = begin
        return quantized


class QueryOperand(_Taken):
    """An operand with the rows of the queries: the query, or the gradient of the context."""

    def take(self, chunk: Chunk, rows: int = 0) -> Tensor:
        """Return the rows of a chunk, [matrices, repeats * queries, d].

        After a transform of the tokens they are `rows`, with those that it added.
        """
        stop = chunk.start + rows if rows else chunk.stop
        return self._rounded(chunk, slice(chunk.start, stop)).flatten(1, 2)


class KeyOperand(_Taken):
    """An operand with the rows of the keys: the key, or the value.

    All keys of a chunk's matrices are kept, rounded, until a chunk has other matrices.
    """

    def __init__(self, operand: Sliced, groups: int, axis: int) -> None:
        super().__init__(operand, groups, axis)
        self._matrices = self._matrices if operand.rounding else self._matrices.contiguous()
        self._range: tuple[int, int] | None = None
        self._kept: Tensor = torch.empty(0)

    def take(self, chunk: Chunk, keys: int = 0) -> Tensor:
        """Return the keys that a chunk reads, [matrices, keys, d].

        After a transform of the tokens they are `keys`, with those that it added.
        """
        if self._range != (chunk.first, chunk.last):
            self._kept = torch.empty(0)  # free it before the next one is made
            self._kept = self._rounded(chunk, slice(None)).squeeze(1)
            self._range = (chunk.first, chunk.last)
        return self._kept[:, chunk.low : chunk.low + keys if keys else chunk.high]
