"""Round a term of a custom quantizer to a format."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS, check_choice
from mqo.quant.plugin_context import QuantizerContext
from mqo.quant.scales import alpha_of
from mqo.quant.spec import QuantSpec


def round_term(
    tensor: Tensor, quant_type: str, context: QuantizerContext, **choices: Any
) -> tuple[Tensor, float]:
    """Return (values, alpha): a tensor [rows, K] rounded to a format, with blocks along K.

    Call it in a quantizer: the result is one that it may return. A scale per tensor is that of
    `context.largest(tensor)`, and random numbers depend on `context.next_seed()`.

    Args:
        tensor: float32, of any number of rows.
        quant_type: a format.
        context: the argument of the quantizer.
        choices: those of `QuantSpec`, such as rounding="stochastic".

    Raises:
        ValueError: there is no such format or choice.
        QuantizerError: the quantizer does not declare what the format needs.
    """
    check_choice("format", quant_type, tuple(FORMATS))
    spec = QuantSpec(quant_type, without_alpha=True, **choices)
    seed = context.next_seed() if spec.rounding == "stochastic" else None
    amax = context.largest(tensor) if spec.scales_by_tensor else None
    values = fake_quantize(tensor, spec, seed=seed, amax=amax)
    return values, 1.0 if amax is None else alpha_of(amax.item(), spec)
