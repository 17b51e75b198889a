"""What says which layer a weight or a module is of: attributes that the operands read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

LABEL = "mqo_layer"
# What of the layer its tensor-parallel ranks share, a Shards or None; beside the label.
SHARDS = "mqo_shards"
# On modules and weights that run unquantized though their source says a type.
EXEMPT = "mqo_exempt"
# Of a weight or module without a label.
UNLABELED = "unlabeled"


@dataclass(frozen=True)
class Layer:
    """A layer, as far as it can be told to other ranks.

    kind: LINEAR, ATTENTION, or a kind without sites (mqo.megatron.layers). module: the name of its
    class. frozen: whether its weight takes no gradient; False for attention. sited: whether it is
    made to call its sites, as far as its class tells.
    """

    name: str
    kind: str
    module: str
    frozen: bool = False
    sited: bool = True


def exempt(model: Module) -> Module:
    """Have all layers of `model`, a part of another one or none, run as type 'none'; return it.

    A teacher runs the very source that its student runs, with the student's types in it. Its
    layers are found by none of the functions in mqo.megatron.layers.
    """
    for part in (*model.modules(), *model.parameters()):
        setattr(part, EXEMPT, True)
    return model


def is_exempt(owner: object) -> bool:
    """Return whether `exempt` was told of this weight or module, or of what it is part of."""
    return getattr(owner, EXEMPT, False)
