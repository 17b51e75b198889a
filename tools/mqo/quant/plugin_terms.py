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
    tensor: Tensor,
    quant_type: str,
    context: QuantizerContext,
    *,
    amax: Tensor | None = None,
    **choices: Any,
) -> tuple[Tensor, float]:
    """Return (values, alpha): a tensor [rows, K] rounded to a format, with blocks along K.

    Call it in a quantizer: the result is one that it may return. Random numbers depend on
    `context.next_seed()`.

    Args:
        tensor: float32, of any number of rows.
        quant_type: a format.
        context: the argument of the quantizer.
        amax: float32 [], from which a scale of the tensor follows, such as one that the state
            holds; None for `context.largest(tensor)`.
        choices: those of `QuantSpec`, such as rounding="stochastic".

    Raises:
        ValueError: there is no such format or choice, or an amax for a format without a scale of
            the tensor.
        QuantizerError: the quantizer does not declare what the format needs.

    Examples:
        >>> @quantizer("two_terms", block=16, needs_amax=True, terms=2)
        ... def two_terms(x, context):
        ...     mean = x.mean(dim=0, keepdim=True).expand_as(x).contiguous()
        ...     return [(mean, 1.0), round_term(x - mean, "nvfp4", context)]
    """
    check_choice("format", quant_type, tuple(FORMATS))
    spec = QuantSpec(quant_type, without_alpha=True, **choices)
    if amax is not None and not spec.scales_by_tensor:
        raise ValueError(f"{quant_type} has no scale of the tensor; valid: no amax")
    seed = context.next_seed() if spec.rounding == "stochastic" else None
    if amax is None and spec.scales_by_tensor:
        amax = context.largest(tensor)
    values = fake_quantize(tensor, spec, seed=seed, amax=amax)
    return values, 1.0 if amax is None else alpha_of(amax.item(), spec)
