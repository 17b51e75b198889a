"""The check that a tensor is finite, and what a failure says."""

import torch
from torch import Tensor

from mqo.quant.progress import step


class FiniteError(RuntimeError):
    """A value that is not finite, and where it was first seen."""


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise FiniteError saying `what` if `tensor` holds a NaN or an infinity; waits for the device.

    Everything that was looked at before was finite, or it would have been said of that.
    """
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        kind = "NaN" if bool(tensor.isnan().any()) else "Inf"
        raise FiniteError(
            f"{kind} in {what}, in iteration {step() + 1}; what came before was finite"
        )


def check_rounding(
    site: str, layer: str, operand: str, quant_type: str, original: Tensor, quantized: Tensor
) -> None:
    """Raise what `check_finite` raises of an operand, before or after it was quantized."""
    check_finite(original, f"{operand} of {site}, layer {layer}")
    check_finite(quantized, f"{operand} of {site} as {quant_type}, layer {layer}")
