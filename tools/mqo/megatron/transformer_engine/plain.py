"""Quantizers for releases of Transformer Engine that multiply plain tensors.

The engine's hybrid quantizer has one tensor for each of the two GEMMs that use an operand, and its
identity quantizer changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from mqo.megatron.transformer_engine.operand import Operand


class _Rounded(IdentityQuantizer):
    """Round a tensor with `round_`, in the tensor's own dtype."""

    def __init__(self, round_: Callable[[Tensor], Tensor], **usage: bool) -> None:
        super().__init__(**usage)
        self._round = round_

    def copy(self) -> _Rounded:
        """Return a copy with the same state."""
        copy = _Rounded(self._round, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        return _with_switches(copy, self)

    def quantize_impl(self, tensor: Tensor) -> Any:
        """Return the rounded tensor in Transformer Engine's class."""
        return super().quantize_impl(self._round(tensor))

    def update_quantized(self, src: Tensor, dst: Any, **more: Any) -> Any:
        """Write the rounded tensor to the engine's tensor `dst`."""
        return super().update_quantized(self._round(src), dst, **more)


class PlainQuantizer(HybridQuantizer):
    """Quantize an operand for each of the two GEMMs that use it.

    Because it is custom, the engine gathers tensors from ranks before rounding; otherwise they
    would be rounded twice.
    """

    custom = True

    @classmethod
    def for_operand(cls, operand: Operand) -> Any:
        """Return the quantizer of an operand; for an output one that changes nothing."""
        if not operand.is_quantized:
            return IdentityQuantizer()
        return cls(
            rowwise_quantizer=_Rounded(operand.rowwise),
            columnwise_quantizer=_Rounded(operand.columnwise),
        )

    def update_quantized(self, src: Tensor, dst: Any, **more: Any) -> Any:
        """Write the forms in use to Transformer Engine's tensor `dst`, and free the others.

        Otherwise a forward pass without gradients would update only one copy (rowwise or
        columnwise) of a cached weight, and a recomputed pass would read the other, outdated copy.
        """
        super().update_quantized(src, dst, **more)
        used = {"rowwise_usage": self.rowwise_usage, "columnwise_usage": self.columnwise_usage}
        dst.update_usage(**{name: False for name, on in used.items() if not on})
        return dst

    def copy(self) -> PlainQuantizer:
        """Return a copy with the same state."""
        copy = PlainQuantizer(
            rowwise_quantizer=self.rowwise_quantizer.copy(),
            columnwise_quantizer=self.columnwise_quantizer.copy(),
        )
        copy.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        return _with_switches(copy, self)


def _with_switches(copy: Any, original: Any) -> Any:
    for name in ("internal", "optimize_for_gemm"):
        if hasattr(original, name):
            setattr(copy, name, getattr(original, name))
    return copy
