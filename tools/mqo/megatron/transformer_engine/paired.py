"""Quantizers for releases that support custom formats only in the quantizer's own GEMM.

Features that such a GEMM does not support are refused, because the engine would silently skip them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.tensor import Quantizer

from mqo.megatron import linear
from mqo.megatron.transformer_engine import releases
from mqo.megatron.transformer_engine.operand import Operand
from mqo.megatron.transformer_engine.releases import EngineError

try:
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
except ImportError:  # its module in older releases
    from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensorStorage


def check(module: Module) -> None:
    """Raise EngineError for a layer that the quantizer's GEMM does not support."""
    fault = None
    if linear.is_grouped(module) or len(linear.weights(module)) > 1:
        fault = "contains several GEMMs"
    elif module.use_bias:
        fault = "uses a bias"
    elif module.fuse_wgrad_accumulation:
        fault = "accumulates weight gradients in its GEMM, where they would be lost"
    if fault:
        raise EngineError(
            f"{type(module).__name__} {fault}. Expected: Transformer Engine "
            f"{releases.text(releases.PLAIN)} or newer, or --disable-bias-linear "
            "--no-gradient-accumulation-fusion and no --moe-grouped-gemm"
        )


class PairedTensor(QuantizedTensorStorage):
    """An operand for both GEMMs: `data`, and transposed `data_t`; either may be missing.

    The engine checks that scales exist; `data` already includes them.
    """

    custom = True

    def __init__(self, data: Tensor | None, data_t: Tensor | None, like: Tensor, own: Any) -> None:
        self.data, self.data_t, self._quantizer = data, data_t, own
        self.original_shape, self.dtype, self.device = tuple(like.shape), like.dtype, like.device

    @property
    def scale(self) -> Tensor:
        """Return the scale of all elements, 1."""
        return torch.ones(())

    scale_t = scale

    def size(self, *dim: int) -> Any:
        """Return the shape of the quantized tensor, or one of its sizes."""
        shape = torch.Size(self.original_shape)
        return shape[dim[0]] if dim else shape

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Free forms that are not needed, and create those that are.

        A weight that a forward pass without gradients kept has only one form; a recomputed pass
        needs the other.
        """
        for name, wanted in (("data", rowwise_usage), ("data_t", columnwise_usage)):
            if wanted and getattr(self, name) is None:
                setattr(self, name, self._quantizer.weights(name))
            if wanted is False:
                setattr(self, name, None)

    def get_usages(self) -> dict[str, bool]:
        """Return which forms exist."""
        return {"rowwise": self.data is not None, "columnwise": self.data_t is not None}

    def prepare_for_saving(self) -> tuple[list[Tensor | None], PairedTensor]:
        """Return the tensors for autograd to save, and release them here."""
        tensors = [self.data, self.data_t]
        self.data = self.data_t = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Restore the first two of the tensors, and return the others."""
        self.data, self.data_t, *others = tensors
        return others

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors."""
        return self.data, self.data_t

    def clear(self) -> None:
        """Free all memory."""
        self.data = self.data_t = None


class PairedQuantizer(Quantizer):
    """Quantize an operand for each of the two GEMMs that use it, and compute these GEMMs."""

    custom = True

    def __init__(self, operand: Operand) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.internal = True
        self._operand = operand

    def quantize_impl(self, tensor: Tensor) -> PairedTensor:
        """Return the forms of `tensor` that are in use."""
        return self.update_quantized(tensor, PairedTensor(None, None, tensor, self))

    def quantize(self, tensor: Tensor, *, out: PairedTensor | None = None, **_: Any) -> Any:
        """Return the forms of `tensor` that are in use, or write them to `out`."""
        with torch.no_grad():
            return self.quantize_impl(tensor) if out is None else self.update_quantized(tensor, out)

    def update_quantized(self, src: Tensor, dst: PairedTensor, **_: Any) -> PairedTensor:
        """Quantize `src` to the forms of `dst` that are in use, and free the others."""
        dst.data = self._made("data", src) if self.rowwise_usage else None
        dst.data_t = self._made("data_t", src) if self.columnwise_usage else None
        return dst

    def weights(self, name: str) -> Tensor:
        """Return the missing form of a weight; EngineError for another operand."""
        if self._operand.tensor != "weight":
            raise EngineError(
                f"Transformer Engine requests {name} of an operand other than a weight"
            )
        with torch.no_grad():
            return self._made(name, self._operand.weight)

    def _made(self, name: str, tensor: Tensor) -> Tensor:
        if name == "data":
            return self._operand.rowwise(tensor).flatten(0, -2)
        return self._operand.columnwise(tensor).flatten(0, -2).t()

    def qgemm(
        self,
        qx: Tensor,
        qw: Tensor,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: Tensor,
        sw: Tensor,
        bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return qx qwᵀ plus the bias: [m, n] for [m, k] and [n, k]."""
        product = qx.matmul(qw.t())
        return (product if bias is None else product + bias).to(out_dtype)

    def _get_compatible_recipe(self) -> type:
        return CustomRecipe
