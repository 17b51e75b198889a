"""Draw the operands of accumulation.py, quantize them, and split them into elements and scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from mqo.quant import reference
from mqo.quant.backend import fake_quantize
from mqo.quant.scales import alpha_of, blocks_of, expand_scales
from mqo.quant.spec import QuantSpec, without_alpha
from mqo.quant.tensor_amax import largest
from torch import Tensor
from torch.distributions import StudentT

# Takes tokens, outputs and K; draws float32 [tokens, K] and [outputs, K].
Draw = Callable[[int, int, int], tuple[Tensor, Tensor]]
# In every 64 channels, the one with this index is multiplied by the factor.
EVERY, WHICH, FACTOR = 64, 17, 50.0


@dataclass(frozen=True)
class Operand:
    """A quantized matrix, which is alpha * whole, and its first rows as elements * scales.

    whole: float32 [rows, K], the values that emulation multiplies. alpha: the scale of the tensor.
    elements: float64 [sample, K]. scales: float64 [sample, K / block].
    """

    whole: Tensor
    elements: Tensor
    scales: Tensor
    alpha: float
    spec: QuantSpec

    @property
    def sample(self) -> Tensor:
        """The first rows of `whole`: float32 [sample, K]."""
        return self.whole[: self.elements.shape[0]]

    @property
    def block(self) -> int:
        """Number of elements that share a scale."""
        return self.elements.shape[1] // self.scales.shape[1]

    @property
    def has_long_scales(self) -> bool:
        """Whether block scales have 24 bits, which no tensor core supports."""
        return self.spec.quant_type != "none" and self.spec.format.scale == "fp32"


def quantize(x: Tensor, kind: str, sample: int) -> Operand:
    """Quantize float32 x [rows, K] along K, where K is a multiple of the block.

    Kind 'none' rounds it to bfloat16.
    """
    spec, length = QuantSpec(kind), x.shape[1]
    if kind == "none":
        whole = x.bfloat16().float()
        scale = torch.ones(sample, 1, dtype=torch.float64)
        return Operand(whole, whole[:sample].double(), scale, 1.0, spec)
    amax, scaled = largest(x), without_alpha(spec)
    values, scales = reference.encode(x[:sample], scaled, -1, None, amax)
    decode = expand_scales(scales.decode, scales.run, length).expand(sample, length)
    blocks = blocks_of(decode, spec.block or length).amax(dim=-1)
    # hif4's powers of two for each 4 and 8 elements stay in the elements.
    elements = values * decode / blocks.repeat_interleave(spec.block or length, dim=1)
    alpha = alpha_of(amax.item(), spec)
    return Operand(fake_quantize(x, scaled), elements, blocks, alpha, spec)


def normal(tokens: int, outputs: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw both operands from N(0, 1)."""
    return torch.randn(tokens, length), torch.randn(outputs, length)


def outliers(tokens: int, outputs: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw both from N(0, 1), and scale up one channel in every 64 of the left operand."""
    a, b = normal(tokens, outputs, length)
    a[:, torch.arange(length) % EVERY == WHICH] *= FACTOR
    return a, b


def heavy_tails(tokens: int, outputs: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw the left operand from Student's t with 3 degrees of freedom, like a gradient."""
    return StudentT(3.0).sample((tokens, length)), torch.randn(outputs, length)


def one_sign(tokens: int, outputs: int, length: int) -> tuple[Tensor, Tensor]:
    """Draw magnitudes of N(0, 1): products do not cancel, so sums grow with K."""
    a, b = normal(tokens, outputs, length)
    return a.abs_(), b.abs_()


DATA: dict[str, Draw] = {
    "normal": normal,
    "outlier channels": outliers,
    "Student-t(3)": heavy_tails,
    "one sign": one_sign,
}
