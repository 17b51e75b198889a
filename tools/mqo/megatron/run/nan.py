"""Finds where the first NaN or infinity comes from, for a run with `check_nan`.

Every module's output is looked at when it is made, and its gradient when that is there, so each
look waits for the device: a run that only wants to know that its loss is finite has upstream's own
check, which costs nothing.
"""

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module

from mqo.quant.finite import check_finite
from mqo.quant.labels import LABEL


def watch(model: Iterable[Module]) -> None:
    """End the run at the first output, or gradient of one, that is not finite.

    The error is FiniteError. A module is named by its layer's label, where it has one, else by its
    path in its chunk. Innermost modules come first, so the name is the narrowest.
    """
    for chunk in model:
        for path, module in chunk.named_modules():
            name = getattr(module, LABEL, None) or _label(module) or path or "the model"
            module.register_forward_hook(_look(name))


def _label(module: Module) -> str | None:
    return getattr(getattr(module, "weight", None), LABEL, None)


def _look(name: str) -> object:
    def look(module: Module, given: object, output: object) -> None:
        del module, given
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor):
                check_finite(tensor.detach(), f"the output of {name}")
                if tensor.requires_grad:
                    tensor.register_hook(
                        lambda g: check_finite(g, f"the gradient of {name}'s output")
                    )

    return look
