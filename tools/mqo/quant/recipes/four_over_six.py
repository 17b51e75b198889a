"""Four over six (arXiv 2512.02010): NVFP4 that scales a block to 6 or to 4, by its error.

Values of E2M1 are far apart between 4 and 6. A block that is scaled to 4 does not use them; it has
more error for small elements. The block takes the scale with the smaller sum of absolute errors.
"""

import torch
from mqo.quant import QuantizerContext, quantizer
from torch import Tensor

SIDE = 16
LARGEST = 6.0  # of E2M1
SCALE_BOUND = (
    256.0  # of the scales that map to 6: 1.5 times as much fits E4M3, whose largest is 448
)


@quantizer("four_over_six", block=16, square=True, needs_amax=True, independent_rows=True)
def four_over_six(x: Tensor, context: QuantizerContext) -> tuple[Tensor, Tensor]:
    """Return the elements times their block scales, and the scale of the tensor."""
    alpha = context.amax / (LARGEST * SCALE_BOUND)
    alpha = torch.where(alpha > 0, alpha, 1.0)
    height = SIDE if context.tile == "square" else 1
    tiles = x.unflatten(1, (-1, SIDE)).unflatten(0, (-1, height))  # [rows, height, blocks, 16]
    of_six, of_four = (_rounded(tiles, alpha, top) for top in (6.0, 4.0))
    six, four = ((alpha * q - tiles).abs().double().sum((1, 3), True) for q in (of_six, of_four))
    values = torch.where(four < six, of_four, of_six)
    return values.flatten(2).flatten(0, 1), alpha


def _rounded(tiles: Tensor, alpha: Tensor, top: float) -> Tensor:
    """Return the tiles over alpha, rounded with scales that map their amax to `top`."""
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = (amax / (top * alpha)).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    elements = torch.where(scale > 0, tiles / (scale * alpha), 0.0)
    return _e2m1(elements) * scale


def _e2m1(x: Tensor) -> Tensor:
    """Round to ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, ties to even."""
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp(-LARGEST, LARGEST)
