"""Measure how the loss and the gradient change when one subset of the GEMMs is quantized.

Each subset gets a forward and a backward pass over the same tokens, with the same weights and the
same random numbers. Everything else stays unquantized.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from mqo.megatron.layers import find_layers
from mqo.megatron.run.errors import SavedError
from mqo.quant.config import current, using
from mqo.quant.formats import ATTENTION, LINEAR
from mqo.quant.progress import set_step
from mqo.quant.subsets import Change, quantized_layers, subsets, unquantized
from torch import Tensor

from .load_model import token_losses, watched_step

EVERYTHING = "everything"


@dataclass(frozen=True)
class Passes:
    """The losses of all tokens in nats, float32, and the gradient of their mean by parameter."""

    losses: Tensor
    gradient: list[Tensor]


def measure(
    model: Any,
    args: Namespace,
    batches: Sequence[list[list[int]]],
    kind: str,
    told: Callable[[int, int], None],
) -> dict[str, Any]:
    """Measure each subset of a kind, and everything at once, which the guard watches.

    `batches` have rows of token ids; `told` is called with the number of measured subsets, and the
    number of all.

    Raises:
        GuardError: a site is not quantized as configured.
        SavedError: nothing of this model is quantized.
    """
    options = current()
    found_layers = find_layers(model)
    names = {
        sites: [
            labeled.layer.name
            for labeled in found_layers
            if labeled.layer.sited and labeled.layer.kind == sites
        ]
        for sites in (LINEAR, ATTENTION)
    }
    members = subsets(options, kind, names)
    if not members:
        raise SavedError("Nothing of this model is quantized", "a recipe or mode for its layers")
    sizes = {
        labeled.layer.name: labeled.owner.numel()
        for labeled in found_layers
        if isinstance(labeled.owner, Tensor)
    }
    with using(unquantized(options)):
        plain = run_passes(model, batches)

    def change(name: str, layers: tuple[str, ...]) -> Change:
        weights = sum(sizes.get(layer, 0) for layer in layers)
        return Change(name, layers, weights, *differences(plain, run_passes(model, batches)))

    with watched_step(model, args):
        everything = change(EVERYTHING, quantized_layers(options, names))
    changes: list[Change] = []
    for member in members:
        told(len(changes), len(members))
        with using(member.options):
            changes.append(change(member.name, member.layers))
    return {
        "loss": plain.losses.double().mean().item(),
        "tokens": plain.losses.numel(),
        "everything": asdict(everything),
        "changes": [asdict(row) for row in changes],
    }


def run_passes(model: Any, batches: Sequence[list[list[int]]]) -> Passes:
    """Run the model forward and backward over all batches, as the first micro-batches of a step."""
    set_step(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    tokens = sum(len(row) - 1 for batch in batches for row in batch)
    losses = []
    for batch in batches:
        of_batch = token_losses(model, batch)
        (of_batch.sum() / tokens).backward()
        losses.append(of_batch.detach().flatten())
        for total, parameter in zip(gradient, parameters, strict=True):
            if parameter.grad is not None:
                total += parameter.grad
                parameter.grad = None
    return Passes(torch.cat(losses), gradient)


def differences(plain: Passes, quantized: Passes) -> tuple[float, float, float]:
    """Return the change of the loss, its standard error, and the relative error of the gradient."""
    change = quantized.losses.double() - plain.losses.double()
    error = change.std(correction=0) / max(1, change.numel() - 1) ** 0.5
    pairs = list(zip(quantized.gradient, plain.gradient, strict=True))
    apart = _norm([quantized_grad - grad for quantized_grad, grad in pairs])
    return change.mean().item(), error.item(), apart / _norm(plain.gradient)


def _norm(tensors: Sequence[Tensor]) -> float:
    squares = (torch.linalg.vector_norm(each, dtype=torch.float64) ** 2 for each in tensors)
    return float(sum(squares)) ** 0.5
