"""The result of rounding an operand."""

from typing import NamedTuple

from torch import Tensor


class Rounded(NamedTuple):
    """A quantized operand: `tensor` times `alpha`.

    `amax`, float32 [], determined the scale of the tensor, if it has one. `alpha` is that scale, or
    1 if `tensor` includes it.
    """

    tensor: Tensor
    amax: Tensor | None = None
    alpha: float = 1.0

    def value(self) -> Tensor:
        """Return the values of the operand, in float32 if alpha is not 1."""
        return self.tensor if self.alpha == 1.0 else self.tensor.float() * self.alpha
