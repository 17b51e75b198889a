"""Quantize a tensor of a Transformer Engine layer for the two GEMMs that use it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from mqo.megatron import linear
from mqo.megatron.transformer_engine.passes import Pass
from mqo.megatron.transformer_engine.releases import EngineError
from mqo.quant.formats import LINEAR, SITES
from mqo.quant.gemms import operands_of
from mqo.quant.micro_batches import resume

# {the engine's name of a tensor: our name of the operand}
_OPERANDS = {"input": "x", "weight": "weight", "grad_output": "grad"}


@dataclass(frozen=True)
class Operand:
    """A tensor of a layer: "input", "weight" or "grad_output" of one of its GEMMs.

    Other tensors, which are outputs, are not quantized.
    """

    tensor: str
    gemm: int
    layer_pass: Pass

    @property
    def is_quantized(self) -> bool:
        """Return whether it is an operand of a linear GEMM."""
        return self.tensor in _OPERANDS

    @property
    def weight(self) -> Parameter:
        """Return the weight of the GEMM."""
        return self.layer_pass.weight(self.gemm)

    def rowwise(self, tensor: Tensor) -> Tensor:
        """Return the operand of the GEMM that sums along the last axis."""
        return self._for("row", tensor)

    def columnwise(self, tensor: Tensor) -> Tensor:
        """Return the operand of the GEMM that sums along the other axes, which count as one."""
        return self._for("column", tensor)

    def _for(self, direction: str, tensor: Tensor) -> Tensor:
        if not self.is_quantized:
            raise EngineError(
                "Transformer Engine requests a quantized output of a layer. Expected: outputs in "
                "the dtype of the model, without --fp8-param-gather, fp8 outputs and fp8 attention"
            )
        site, hand = _gemms(_OPERANDS[self.tensor])[direction]
        weight = self.weight
        resume(self.layer_pass)
        operands = operands_of(site, linear.source_types()[site], weight)
        matrix = weight if self._is(weight, tensor) else tensor.reshape(-1, tensor.shape[-1])
        quantized = getattr(operands, hand)(matrix)
        # A transform may make the summed axis longer; then the operand stays a matrix.
        shape = tensor.shape if quantized.shape == matrix.shape else quantized.shape
        # Another tensor with the same memory, because the engine may free its tensor.
        return quantized.reshape(shape).detach()

    def _is(self, weight: Tensor, tensor: Tensor) -> bool:
        """Return whether `tensor` is the weight itself, whose quantized copies are cached."""
        return self.tensor == "weight" and tensor.data_ptr() == weight.data_ptr()


@functools.cache
def _gemms(operand: str) -> Mapping[str, tuple[str, str]]:
    """Return {direction: (site, method)} of the linear GEMMs that use an operand."""
    gemms = {}
    for site in SITES.values():
        sides = {site.lhs: ("lhs", site.lhs_axis), site.rhs: ("rhs", site.rhs_axis)}
        if site.layer == LINEAR and operand in sides:
            hand, axis = sides[operand]
            gemms["row" if axis == -1 else "column"] = (site.name, hand)
    return gemms
