"""MS-EDEN of Quartet II (arXiv 2601.22813, Algorithm 1): unbiased NVFP4 for gradients.

Stochastic rounding of elements is unbiased, but has more than twice the squared error of rounding
to nearest. MS-EDEN rounds elements to nearest, after a random rotation R that differs in each step
and micro-batch. Each group of 16 is then multiplied by the factor of EDEN (arXiv 2108.08842):

    y = R x,  S = <y, y> / <y, Q(y)>,  result = R^T (S Q(y))

S becomes part of the group's E4M3 scale, and stochastic rounding of this scale keeps its mean. So
the mean of <x, result> is <x, x>, except for groups that are small enough for a scale of 0. The
mean of each element of the result approaches x as rotations grow. With 128 elements the rest of the
bias is small, unless nearly all of x is zero.
"""

import torch
from mqo.quant import QuantizerContext, quantizer
from torch import Tensor

SIZE = 128  # of a rotation
GROUP = 16  # elements with one scale
SCALE_BOUND = 256.0  # of the scales before S, which can increase them; E4M3 ends at 448


@quantizer(
    "ms_eden",
    block=128,
    needs_amax=True,
    stochastic=True,
    independent_rows=True,
    options={"gain": 0.93, "rotate": True},
)
def ms_eden(x: Tensor, context: QuantizerContext) -> tuple[Tensor, Tensor]:
    """Return R^T (S Q(R x)) over the scale of the tensor, and that scale.

    Options:
        gain: scales map the amax of a group to 6 · (16/17) / gain; 6 is the largest E2M1 value.
            With 1 nothing saturates, because rounding divides a scale by at most 17/16. The
            0.93 of section 3.3 has the smallest squared error.
        rotate: False leaves R to a recipe, `hadamard = 128, signs = "random"` for both operands of
            a GEMM. They then have the same R, as on hardware, and it cancels in the product.
    """
    # Each row has its own signs. Rows and operands need no common R, because it is undone here, and
    # so the result of a row does not depend on the other rows that a rank or thread has. The first
    # bit of a random number is the sign; the other 23 bits, independent of it, are a draw, of which
    # each group needs one.
    rotate, numbers = context.options["rotate"], 2.0 * context.rand()
    signs = 1.0 - 2.0 * numbers.floor()
    draws = numbers[:, ::GROUP, None].frac()

    # Section 3.3 takes the amax of R x, which other ranks and threads do not know. It is at most
    # sqrt(128) times that of x; the factor 8 is enough, because scales may exceed SCALE_BOUND.
    largest = 6.0 * 16.0 / 17.0 / context.options["gain"]
    alpha = context.amax * ((8.0 if rotate else 1.0) / (SCALE_BOUND * largest))
    alpha = torch.where(alpha > 0, alpha, 1.0)

    y = x / alpha
    groups = (_hadamard(signs * y) if rotate else y).unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2, keepdim=True) / largest).to(torch.float8_e4m3fn).float()
    scales = torch.where(scales > 0, scales, 1.0)
    rounded = _e2m1(groups / scales)
    corrected = _eden_factor(groups / scales, rounded) * scales
    values = (rounded * _stochastic_e4m3(corrected, draws)).flatten(1)
    return (signs * _hadamard(values) if rotate else values), alpha


def _hadamard(x: Tensor) -> Tensor:
    """Multiply each 128 elements by Sylvester's Hadamard matrix over sqrt(128), its own inverse."""
    y = x.unflatten(1, (-1, SIZE))
    for _ in range(SIZE.bit_length() - 1):  # a pass puts sums of pairs first, then differences
        y = torch.cat((y[..., ::2] + y[..., 1::2], y[..., ::2] - y[..., 1::2]), -1)
    rotated: Tensor = y * SIZE**-0.5
    return rotated.flatten(1)


def _e2m1(x: Tensor) -> Tensor:
    """Round to ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, ties to even."""
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp(-6.0, 6.0)


def _eden_factor(x: Tensor, rounded: Tensor) -> Tensor:
    """Return S = <x, x> / <x, rounded> of each group, float64, and 1 if all is rounded to zero."""
    x = x.double()  # products are exact; in float32 the order of a sum would matter
    overlap = (x * rounded).sum(2, keepdim=True)
    return torch.where(overlap > 0, (x * x).sum(2, keepdim=True) / overlap, 1.0)


def _stochastic_e4m3(x: Tensor, draws: Tensor) -> Tensor:
    """Round positive x to E4M3, up if the draw is below the share of the way to the upper value."""
    power = x / torch.frexp(x).mantissa  # the power of two with power / 2 <= x < power
    step = (power / 16.0).clamp(min=2.0**-9)
    lower = (x / step).floor()
    return ((lower + (draws < x / step - lower)) * step).clamp(max=448.0).float()
