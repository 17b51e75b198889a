"""Find the origin of the first NaN or infinity, for a run with `check_nan`.

Every module's output and its gradient are checked as soon as they exist, and each check waits for
the device. Upstream's own check of the loss costs nothing.
"""

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module

from mqo.quant.finite import check_finite
from mqo.quant.labels import LABEL


def watch(model: Iterable[Module]) -> None:
    """Raise FiniteError at the first output, or gradient of an output, that is not finite.

    A module is named by the label of its layer, if it has one, else by its path in its chunk.
    Inner modules run first, so the name is the most specific.
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
