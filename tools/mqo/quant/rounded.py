"""The result of rounding an operand."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Rounded(NamedTuple):
    """A quantized operand: `tensor` times `alpha`, plus the terms in `rest`.

    `amax`, float32 [], determined the scale of the tensor, if it has one. `alpha` is that scale, or
    1 if `tensor` includes it. An operand that is one term has no `rest`.
    """

    tensor: Tensor
    amax: Tensor | None = None
    alpha: float = 1.0
    rest: tuple["Rounded", ...] = ()

    @property
    def terms(self) -> tuple["Rounded", ...]:
        """All terms, each without a rest."""
        return (self._replace(rest=()), *self.rest)

    def value(self) -> Tensor:
        """Return the values of the operand, in float32 if alpha is not 1 or it is a sum."""
        if self.rest:
            return sum((term.value().float() for term in self.rest), self.terms[0].value().float())
        return self.tensor if self.alpha == 1.0 else self.tensor.float() * self.alpha

    def map(self, function: Callable[[Tensor], Tensor]) -> "Rounded":
        """Return the same with `function` of each tensor."""
        rest = tuple(term.map(function) for term in self.rest)
        return self._replace(tensor=function(self.tensor), rest=rest)

    def divided(self, divisor: float) -> "Rounded":
        """Return the same with each alpha divided."""
        if divisor == 1.0:
            return self
        rest = tuple(term.divided(divisor) for term in self.rest)
        return self._replace(alpha=self.alpha / divisor, rest=rest)
