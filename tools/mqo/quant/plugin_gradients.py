"""Compute the gradient of an operand with the function of its quantizer."""

import torch
from torch import Tensor

from mqo.quant.plugin_calls import as_rows, from_blocks, run_function, to_blocks
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
    rows = (as_rows(tensor, axis).float() for tensor in (grad, x))
    tensors = [to_blocks(tensor, plugin.block, spec.tile).contiguous() for tensor in rows]
    subject = f"the estimator of {plugin.name}"
    result = run_function(subject, plugin.estimate, *(t.clone() for t in tensors), context)
    if not isinstance(result, torch.Tensor) or result.shape != tensors[0].shape:
        raise QuantizerError(
            f"{subject} returned no tensor {list(tensors[0].shape)} for {context.describe()}"
        )
    return from_blocks(result, grad, axis)
