"""Compute the gradient of an operand with the function of its quantizer."""

import torch
from torch import Tensor

from mqo.quant.plugin_calls import from_blocks, own_rows, run_function
from mqo.quant.plugin_context import CallSite, QuantizerContext, QuantizerError
from mqo.quant.plugins import PLUGINS
from mqo.quant.spec import QuantSpec


def estimated(
    grad: Tensor,
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    site: CallSite,
) -> Tensor:
    """Return the gradient with respect to `x`, from that with respect to the rounded `x`.

    `spec` names a quantizer with an estimator; the other arguments are those of its call.

    Raises:
        QuantizerError: the function raised an error, or returned no tensor of the shape of x.
    """
    if not grad.numel():
        return grad
    plugin = PLUGINS[spec.quant_type]
    assert plugin.estimate is not None  # the call in the forward pass checked it
    context = QuantizerContext.begin(plugin, spec, site, x.device)
    rows = [own_rows(tensor, axis, plugin.block, spec.tile) for tensor in (grad, x)]
    shape, subject = rows[0].shape, f"the estimator of {plugin.name}"
    result = run_function(subject, plugin.estimate, *rows, context)
    if not isinstance(result, torch.Tensor) or result.shape != shape:
        raise QuantizerError(f"{subject} returned no tensor {list(shape)} for {context.describe()}")
    return from_blocks(result, grad, axis)
