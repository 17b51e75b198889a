"""The five products of attention's backward pass, and what each of them multiplies.

    qk_recompute  S = query key^T           probs = softmax(S)
    dv            dvalue = probs^T grad     grad is the gradient of the context
    dp            dprobs = grad value^T     ds = the gradient of S, from dprobs and probs
    dq            dquery = ds key
    dk            dkey = ds^T query

A product without a type multiplies what the forward pass multiplied: its rounded query, key, value
and probs, with grad and ds unrounded. If these have a transform, it is undone. A product with a
type transforms and rounds the unrounded tensors itself.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from mqo.quant.gemms import GemmOperands
from mqo.quant.micro_batches import resume


class Heads(NamedTuple):
    """Query [sq, b, np, hn], key [sk, b, ng, hn] and value [sk, b, ng, hv]."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class BackwardOperands:
    """The quantizers of the products, by the names of their sites."""

    qk_recompute: GemmOperands
    dv: GemmOperands
    dp: GemmOperands
    dq: GemmOperands
    dk: GemmOperands

    @classmethod
    def untyped(cls) -> "BackwardOperands":
        """Return the quantizers of products without a type."""
        return cls(*(GemmOperands() for _ in range(5)))

    @property
    def typed(self) -> list[str]:
        """The names of the products with a type."""
        return [site for site, operands in vars(self).items() if operands.has_type]

    def save(self, ctx: Any, rounded: Heads, unrounded: Heads) -> None:
        """Store in `ctx` the tensors that the products multiply, and the micro-batch."""
        readers = ((self.qk_recompute, self.dk), (self.qk_recompute, self.dq), (self.dp,))
        kept: list[Tensor | None] = []
        for tensors, is_read in ((rounded, False), (unrounded, True)):
            for tensor, products in zip(tensors, readers, strict=True):
                reads = any(product.has_type == is_read for product in products)
                kept.append(_alone(tensor) if reads else None)
        ctx.save_for_backward(*kept)
        self.qk_recompute.quantization.micro_batches.keep(ctx)


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of a part: a saved part of a projection would keep all of it."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def saved(ctx: Any) -> tuple[Heads, Heads]:
    """Return what `save` stored, None for tensors that no product reads; set the micro-batch."""
    resume(ctx)
    tensors = ctx.saved_tensors
    return Heads(*tensors[:3]), Heads(*tensors[3:])
