"""Let custom quantizers compute gradients in Megatron's linear layers."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from mqo.megatron import linear
from mqo.megatron.layers import FoundLayer
from mqo.quant.config import current
from mqo.quant.formats import LINEAR
from mqo.quant.gemms import GemmOperands, operands_of
from mqo.quant.labels import LABEL, SHARDS
from mqo.quant.plugins import PLUGINS


def attach(layers: Iterable[FoundLayer]) -> list[str]:
    """Hook each layer whose quantizer may compute gradients; return what cannot be hooked.

    The gradients of an input are changed where it enters the layer: there they are summed over
    tensor-parallel ranks. Those of a weight are changed before they are added to its gradient.
    """
    if not any(PLUGINS[name].estimator for name in current().own_types()):
        return []
    faults = []
    for found_layer in layers:
        layer, module = found_layer.layer, found_layer.module
        if layer.kind != LINEAR or not layer.sited or not _may_estimate(layer.name):
            continue
        if fault := _fault(module):
            faults.append(f"{layer.name} {fault}")
            continue
        hook = partial(_enter, owner=found_layer.owner)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        weight: Any = getattr(module, "weight", None)
        if weight is not None and weight.requires_grad:  # a tied one is an argument of the layer
            weight.register_hook(lambda grad, weight=weight: _of_weight(grad, weight))
    return faults


def _may_estimate(layer: str) -> bool:
    """Return whether the layer has a quantizer with an estimator at any step."""
    config = current()
    specs = [
        config.operand_spec("fprop", operand, layer, phase.quant_type).spec
        for operand in ("x", "weight")
        for phase in config.phases("fprop")
    ]
    return any(spec.plugin is not None and spec.plugin.estimator for spec in specs)


def _fault(module: Any) -> str:
    """Return why the gradients of a layer cannot be changed; "" if they can."""
    if linear.is_engines(module):
        return "is a layer of Transformer Engine"
    if getattr(module, "gradient_accumulation_fusion", False):
        return "fuses the addition of gradients: use --no-gradient-accumulation-fusion"
    return ""


def _operands(owner: object) -> GemmOperands:
    return operands_of("fprop", linear.source_types()["fprop"], owner)


class _Estimated(torch.autograd.Function):
    """Return an operand unchanged, with the gradient that its quantizer computes."""

    @staticmethod
    def forward(ctx: Any, operand: Tensor, side: str, owner: object) -> Tensor:
        ctx.save_for_backward(operand)
        ctx.side, ctx.owner = side, owner
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (operand,) = ctx.saved_tensors
        return _operands(ctx.owner).estimated(ctx.side, grad, operand), None, None


def _enter(
    module: Module, inputs: tuple[Any, ...], named: dict[str, Any], owner: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the input of a layer, and a tied weight, before the layer multiplies them."""
    x, *rest = inputs
    x = _with_gradient(x, "lhs", owner)
    weight = named.get("weight")  # tied; on a last stage it is also a parameter of this layer
    if weight is not None and weight is not getattr(module, "weight", None):
        tied = _with_gradient(weight, "rhs", owner)
        if tied is not weight:
            for label in (LABEL, SHARDS):
                setattr(tied, label, getattr(weight, label))
        named = named | {"weight": tied}
    return (x, *rest), named


def _with_gradient(operand: Tensor, side: str, owner: object) -> Tensor:
    if not (torch.is_grad_enabled() and operand.requires_grad):
        return operand
    if not _operands(owner).has_estimator(side):
        return operand
    function: Any = _Estimated
    wrapped: Tensor = function.apply(operand, side, owner)
    return wrapped


def _of_weight(grad: Tensor, weight: Tensor) -> Tensor:
    return _operands(weight).estimated("rhs", grad, weight.detach())
