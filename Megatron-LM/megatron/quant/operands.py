"""What the patched Megatron source calls: quantizes the two operands of a GEMM on their way in."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from .backend import fake_quantize
from .config import current, is_excluded, scheduled, spec_of
from .finite import check_finite
from .formats import SITES, GemmSite, check_choice, check_type
from .layers import LABEL, SHARDS, is_exempt
from .packed_activations import save_packed
from .record import RECORDER
from .spec import QuantSpec
from .stochastic import operand_seed
from .tensor_amax import Shards, largest, shared_amax
from .weights import cached

UNLABELED = "unlabeled"


class GemmOperands:
    """The operands of one GEMM; here those of an unquantized one, which pass through untouched."""

    __slots__ = ()

    def lhs(self, tensor: Tensor) -> Tensor:
        """Return the left operand as the GEMM shall see it."""
        return tensor

    def rhs(self, tensor: Tensor) -> Tensor:
        """Return the right operand as the GEMM shall see it."""
        return tensor

    def save(self, ctx: object, activation: Tensor, weight: Tensor, gathered: Tensor) -> None:
        """Change what `ctx` saved of a linear layer's forward pass, if the run asks for that."""


_UNQUANTIZED = GemmOperands()


@dataclass(frozen=True, slots=True)
class QuantizedOperands(GemmOperands):
    """Quantizes the operands of one layer's GEMM, and records that it did.

    Gradients pass straight through, also where the rounding saturates.
    """

    site: GemmSite
    spec: QuantSpec
    layer: str
    shards: Shards | None = None

    def lhs(self, tensor: Tensor) -> Tensor:
        """Return the left operand, quantized along the site's contraction axis."""
        return self._quantize(tensor, self.site.lhs, self.site.lhs_axis)

    def rhs(self, tensor: Tensor) -> Tensor:
        """Return the right operand, quantized along the site's contraction axis."""
        return self._quantize(tensor, self.site.rhs, self.site.rhs_axis)

    def save(self, ctx: object, activation: Tensor, weight: Tensor, gathered: Tensor) -> None:
        """With `save_activations = "packed"`, save the activation as codes; else change nothing.

        `activation` is this rank's: under sequence parallelism not the left operand, `gathered`,
        but a part of it.
        """
        if current().save_activations == "packed":
            site, spec = self.site, self.spec
            amax = self._amax(gathered, site.lhs)
            if amax is None and spec.format.needs_tensor_amax:
                amax = largest(gathered)
            seed = self._seed(site.lhs)
            save_packed(ctx, activation, weight, spec, site.lhs_axis, seed, amax)

    def _quantize(self, tensor: Tensor, operand: str, axis: int) -> Tensor:
        site, spec, layer = self.site.name, self.spec, self.layer
        seed = self._seed(operand)

        def quantize(original: Tensor) -> Tensor:
            def make(out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
                amax = self._amax(original, operand)
                return fake_quantize(original, spec, axis=axis, out=out, seed=seed, amax=amax), amax

            if isinstance(original, Parameter) and current().cache_weights:
                quantized, amax = cached(original, spec, axis, seed, make)
            else:
                quantized, amax = make()
            if current().check_nan:
                check_finite(original, f"{operand} of {site}, layer {layer}")
                kind = spec.quant_type
                check_finite(quantized, f"{operand} of {site} as {kind}, layer {layer}")
            RECORDER.observe(site, layer, operand, spec, axis, original, quantized, amax)
            return quantized

        return _StraightThrough.apply(tensor, quantize)

    def _amax(self, tensor: Tensor, operand: str) -> Tensor | None:
        """Return what `fake_quantize` takes as amax; a collective where ranks hold shards."""
        if not self.spec.format.needs_tensor_amax:
            return None
        return shared_amax(tensor, operand, self.shards)

    def _seed(self, operand: str) -> int | None:
        if self.spec.rounding != "stochastic":
            return None
        return operand_seed(current().seed, self.site.name, operand, self.layer)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        return quantize(tensor)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def gemm_operands(site: str, quant_type: str, owner: object) -> GemmOperands:
    """Return what quantizes the operands of `owner`'s GEMM at `site`.

    Args:
        site: a name in SITES, which says along which axes the operands are quantized.
        quant_type: one of QUANT_TYPES; with 'none' both operands pass through as they are. A
            schedule of the run's may say another type at this step.
        owner: the weight Parameter (linear sites) or the attention module (qk, pv); its
            labels, set by `label_layers`, are read here, since a view of it has none. Both
            operands of a layer that is exempt, or that the run excludes, pass through as they are.

    Raises:
        ValueError: the site or the type is unknown; the text names the valid ones.
    """
    check_choice("GEMM site", site, tuple(SITES))
    check_type(quant_type)
    quant_type = scheduled(site, quant_type)
    if quant_type == "none" or is_exempt(owner):
        return _UNQUANTIZED
    layer = getattr(owner, LABEL, UNLABELED)
    if is_excluded(site, layer):
        RECORDER.record_excluded(site, layer)
        return _UNQUANTIZED
    shards = getattr(owner, SHARDS, None)
    return QuantizedOperands(SITES[site], spec_of(quant_type), layer, shards)
