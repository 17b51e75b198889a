"""Check that a tensor is finite."""

import torch
from torch import Tensor

from mqo.quant.progress import PROGRESS


class FiniteError(RuntimeError):
    """A value that is not finite, and where it was first seen."""


def check_finite(tensor: Tensor, subject: str) -> None:
    """Raise FiniteError about `subject` if `tensor` has a NaN or an infinity; wait for the device.

    All tensors that were checked before were finite.
    """
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        kind = "NaN" if bool(tensor.isnan().any()) else "Inf"
        raise FiniteError(
            f"{kind} in {subject}, in iteration {PROGRESS.step + 1}; what came before was finite"
        )


def check_rounding(
    site: str, layer: str, operand: str, quant_type: str, original: Tensor, quantized: Tensor
) -> None:
    """Check that an operand is finite before and after quantization, as `check_finite`."""
    check_finite(original, f"{operand} of {site}, layer {layer}")
    check_finite(quantized, f"{operand} of {site} as {quant_type}, layer {layer}")
