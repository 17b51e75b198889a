"""Squares of attention's operands: a tile covers tokens of one head, or queries and keys of one.

A linear layer flattens all tokens to the rows of one matrix. In attention each head of each
sequence has a matrix of its own, whose first tile begins at its first row.
"""

from torch import Tensor
from torch.nn.functional import pad

from mqo.quant.backend import fake_quantize
from mqo.quant.spec import QuantSpec

_OF_SCORES = ("probs", "ds")  # [b * h, sq, sk]; other operands are [s, b, h, d] or [s, b * h, d]


def quantize_operand(
    x: Tensor, spec: QuantSpec, operand: str, seed: int | None, amax: Tensor | None
) -> Tensor:
    """Quantize an operand of attention in squares."""
    rounded = quantize_matrices(_by_head(x, operand), spec, seed, amax)
    return rounded if operand in _OF_SCORES else rounded.movedim(-2, 0)


def quantize_matrices(
    matrices: Tensor, spec: QuantSpec, seed: int | None, amax: Tensor | None
) -> Tensor:
    """Quantize matrices [..., rows, columns] in squares, each matrix in tiles of its own."""
    rounded = fake_quantize(whole_tiles(matrices, spec), spec, seed=seed, amax=amax)
    return rounded[..., : matrices.shape[-2], :]


def tiles_of(x: Tensor, spec: QuantSpec, operand: str) -> Tensor:
    """Return an operand of attention as matrices of whole tiles."""
    return whole_tiles(_by_head(x, operand), spec)


def whole_tiles(matrices: Tensor, spec: QuantSpec) -> Tensor:
    """Return matrices [..., rows, columns] with rows of zeros after the last one, to whole tiles.

    Without them the tiles of one matrix would continue in the next one.
    """
    missing = -matrices.shape[-2] % spec.block_size
    return pad(matrices, (0, 0, 0, missing)) if missing else matrices


def _by_head(x: Tensor, operand: str) -> Tensor:
    """View an operand as matrices [..., rows, columns], one per head and sequence."""
    return x if operand in _OF_SCORES else x.movedim(0, -2)
