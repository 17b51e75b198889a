"""Attributes of weights and modules that name their layer, for the operands of GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

LABEL = "mqo_layer"
# The Shards that tensor-parallel ranks hold of the layer, or None.
SHARDS = "mqo_shards"
# Set on modules and weights that stay unquantized although the source has a type.
EXEMPT = "mqo_exempt"
# Used as the label of a weight or module without one.
UNLABELED = "unlabeled"


@dataclass(frozen=True)
class Layer:
    """The description of a layer that ranks exchange.

    kind: LINEAR, ATTENTION, or a kind without sites (mqo.megatron.layers). module: the name of its
    class. frozen: whether its weight has no gradient; False for attention. sited: whether its class
    has quantization sites.
    """

    name: str
    kind: str
    module: str
    frozen: bool = False
    sited: bool = True


def exempt(model: Module) -> Module:
    """Leave all layers of `model`, a model or a part of one, unquantized; return `model`.

    A teacher runs the same source as its student, with the student's types. The functions of
    mqo.megatron.layers do not list its layers.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))
        >>> head = exempt(model[1])
    """
    for part in (*model.modules(), *model.parameters()):
        setattr(part, EXEMPT, True)
    return model


def is_exempt(owner: object) -> bool:
    """Return whether `exempt` was called with this weight or module, or with a parent of it."""
    return getattr(owner, EXEMPT, False)
