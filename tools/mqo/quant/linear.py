"""A linear layer with quantized GEMMs, for any model in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mqo.quant.autocast import autocasted
from mqo.quant.gemms import GemmOperands, model_operands
from mqo.quant.labels import LABEL
from mqo.quant.packed_activations import saved_operands
from mqo.quant.quantization import ModelQuantization


class QuantLinear(nn.Linear):
    """A `torch.nn.Linear` that rounds the operands of its GEMMs; its state dict is the same.

    Forward is x · weightᵀ (fprop), backward grad · weight (dgrad) and gradᵀ · x (wgrad). Rounding
    counts as the identity in the backward pass. The operations, and so all bits, are those of
    Megatron's linear layers with the same options and layer name.

    Args:
        in_features, out_features, bias, device, dtype: those of `torch.nn.Linear`.
        quantization: the options; all layers of a model share one.
        name: the name of the layer, which patterns match and random numbers depend on.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 4))
        >>> quantize_model(model, "mxfp8").layers
        ('0',)
        >>> isinstance(model[0], QuantLinear)
        True
    """

    quantization: ModelQuantization

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quantization: ModelQuantization,
        name: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._attach(quantization, name)

    @classmethod
    def replace(cls, linear: nn.Linear, quantization: ModelQuantization, name: str) -> None:
        """Turn `linear` itself into a layer of this class: its parameters and hooks stay."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear._attach(quantization, name)

    def _attach(self, quantization: ModelQuantization, name: str) -> None:
        self.quantization = quantization
        # With a hook, torch.nn.TransformerEncoderLayer calls the layer, also in evaluation.
        self.register_forward_pre_hook(_do_nothing)
        setattr(self, LABEL, name)

    @property
    def name(self) -> str:
        """The name of the layer."""
        name: str = getattr(self, LABEL)
        return name

    def operands(self, site: str) -> GemmOperands:
        """Return the operands of a GEMM: 'fprop', 'dgrad' or 'wgrad'."""
        return model_operands(site, self, self.quantization)

    def forward(self, input: Tensor) -> Tensor:
        """Return input · weightᵀ + bias, [..., out_features], for input [..., in_features].

        torch.compile compiles the code around it. Under autocast, it converts operands as
        `torch.nn.Linear` does, before it rounds them.
        """
        output: Tensor = _forward(self, input)
        return output

    def extra_repr(self) -> str:
        """Return the sizes and the types of the three GEMMs."""
        types = self.quantization.types_of(self.name)
        return f"{super().extra_repr()}, {', '.join(f'{s}={t}' for s, t in types.items())}"


def _do_nothing(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    pass


def _apply(layer: QuantLinear, x: Tensor) -> Tensor:
    layer.quantization.begin_pass(layer)
    function: Any = _Linear
    output: Tensor = function.apply(*autocasted(x, layer.weight, layer.bias), layer)
    return output


# Counters, caches and alphas are read in Python.
_forward: Any = torch.compiler.disable(_apply)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: QuantLinear
    ) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.layer = layer
        operands = layer.operands("fprop")
        saves_x = needs_weight or (needs_x and operands.has_estimator("lhs"))
        saves_weight = needs_x or (needs_weight and operands.has_estimator("rhs"))
        ctx.save_for_backward(x if saves_x else None, weight if saves_weight else None)
        if needs_weight:
            operands.save(ctx, x, weight, x)
        else:
            layer.quantization.micro_batches.keep(ctx)
        with torch.autocast(x.device.type, enabled=False):
            product = operands.product(torch.matmul)
            output: Tensor = product(operands.lhs(x), operands.rhs(weight).t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved_operands(ctx)
        ctx.layer.quantization.states.is_fixed = False  # an evaluation may have run since forward
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_x = of_weight = None
        with torch.autocast(grad.device.type, enabled=False):
            if needs_x:
                operands = ctx.layer.operands("dgrad")
                of_x = operands.product(torch.matmul)(operands.lhs(grad), operands.rhs(weight))
                of_x = ctx.layer.operands("fprop").estimated("lhs", of_x, x)
            rows = grad.reshape(-1, grad.shape[-1])
            if needs_weight:
                operands = ctx.layer.operands("wgrad")
                product = operands.product(torch.matmul)
                inputs = x.reshape(-1, x.shape[-1])
                of_weight = product(operands.lhs(rows).t(), operands.rhs(inputs))
                of_weight = ctx.layer.operands("fprop").estimated("rhs", of_weight, weight)
        return of_x, of_weight, rows.sum(dim=0) if needs_bias else None, None
