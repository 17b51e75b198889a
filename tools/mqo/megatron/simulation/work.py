"""Count a rank's work: matrix products with their types, and the bytes of other operations."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mqo.megatron.simulation.memory import tensors
from mqo.megatron.simulation.rows import Work
from mqo.megatron.simulation.watch import Call
from mqo.quant import formats
from mqo.quant.labels import LABEL, UNLABELED

aten = torch.ops.aten
# Computes all experts at once, from concatenated operands that have no tag.
GROUPED = aten._grouped_mm
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmm_, aten.baddbmm_, GROUPED}
OF_BACKWARD = " backward"
_COPIES = {aten.clone, aten._to_copy}
# Operations that move no data.
_FREE = ("empty", "_unsafe_view", "detach", "alias", "set_", "lift_fresh", "resize_", "new_empty")


class Tag(NamedTuple):
    """The site that an operand passed."""

    site: str
    layer: str
    quant_type: str


@dataclass
class Tags:
    """Store the last site that a tensor passed, by its storage.

    `latest` has the last tag of each site, `sides` the last tags of left and right operands.
    """

    latest: dict[str, Tag] = field(default_factory=dict)
    sides: dict[str, Tag] = field(default_factory=dict)
    _tags: dict[int, tuple[Any, Tag]] = field(default_factory=dict)

    def put(self, tensor: Tensor, tag: Tag, side: str) -> Tensor:
        """Tag a tensor, the operand of this side, and return it."""
        self._put(tensor, tag)
        self.latest[tag.site] = self.sides[side] = tag
        return tensor

    def _put(self, tensor: Tensor, tag: Tag) -> None:
        storage = tensor.untyped_storage()
        self._tags[storage._cdata] = (weakref.ref(storage), tag)

    def copy(self, tensor: Tensor, result: Tensor) -> None:
        """Tag a copy of an operand of attention, whose chunks copy the rows that they multiply.

        A copy of another operand may be used elsewhere.
        """
        tag = self.get(tensor)
        if tag and formats.SITES[tag.site].layer == formats.ATTENTION:
            self._put(result, tag)

    def get(self, tensor: Tensor) -> Tag | None:
        """Return a tensor's tag."""
        storage = tensor.untyped_storage()
        reference, tag = self._tags.get(storage._cdata, (lambda: None, None))
        return tag if reference() is storage else None


class TaggedOperands:
    """Quantize the operands of a GEMM, and tag them."""

    def __init__(self, real: Any, tags: Tags, site: str, layer: str) -> None:
        self._real, self._tags, self._site, self._layer = real, tags, site, layer

    def lhs(self, tensor: Tensor) -> Tensor:
        """Return the left operand for the GEMM."""
        return self._put("lhs", self._real.lhs(tensor))

    def rhs(self, tensor: Tensor) -> Tensor:
        """Return the right operand for the GEMM."""
        return self._put("rhs", self._real.rhs(tensor))

    def lhs_parts(self, *sizes: Any) -> TaggedParts:
        """Return a quantizer that takes the left operand in parts."""
        return TaggedParts(self._real.lhs_parts(*sizes), partial(self._put, "lhs"))

    def sliced(self, side: str, tensor: Tensor) -> Any:
        """Return an operand to be quantized in slices."""
        sliced = self._real.sliced(side, tensor)
        if sliced.rounding is None:
            self._put(side, sliced.tensor)
            return sliced
        return replace(sliced, rounding=TaggedParts(sliced.rounding, partial(self._put, side)))

    def _put(self, side: str, tensor: Tensor) -> Tensor:
        tag = Tag(self._site, self._layer, quant_type_of(self._real, side))
        return self._tags.put(tensor, tag, side)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class TaggedParts:
    """Quantize parts of an operand, and tag them."""

    def __init__(self, real: Any, put: Callable[[Tensor], Tensor]) -> None:
        self._real, self._put = real, put

    def quantize(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a part of the operand for the GEMM."""
        return self._put(self._real.quantize(*args, **kwargs))

    def with_amax(self, amax: Tensor) -> TaggedParts:
        """Return the same with the amax of the whole operand."""
        return TaggedParts(self._real.with_amax(amax), self._put)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def quant_type_of(operands: Any, side: str) -> str:
    """Return the quant type of one operand of a GEMM; "none" if it is not quantized."""
    site = getattr(operands, "site", None)
    if site is None:
        return "none"
    return operands.options.operand_type(
        site.name, getattr(site, side), operands.layer, operands.quant_type
    )


def tagging(real: Callable[..., Any], tags: Tags) -> Callable[..., Any]:
    """Return `mqo.quant.gemm_operands` with tagged operands."""

    def gemm_operands(site: str, quant_type: str, owner: object) -> TaggedOperands:
        layer = getattr(owner, LABEL, UNLABELED)
        return TaggedOperands(real(site, quant_type, owner), tags, site, layer)

    return gemm_operands


@dataclass
class Works:
    """An observer that counts work."""

    tags: Tags
    counts: Counter[Work] = field(default_factory=Counter)
    # {autograd's node: the name of the product that it differentiates}
    _nodes: dict[int, str] = field(default_factory=dict)

    def __call__(self, call: Call) -> None:
        """Count the work of an operation."""
        if call.func is None:  # a fused region
            self._other(call, call.args[0])
            return
        packet = call.func.overloadpacket
        if call.func.namespace in ("c10d", "prim"):
            return
        if packet in _COPIES:
            self.tags.copy(call.args[0], call.result)
        if packet in PRODUCTS:
            self.counts[self._product(call)] += 1
        elif packet in ATTENTION:
            self.counts[self._attention(call)] += 1
        elif not (call.func.is_view or packet.__name__.startswith(_FREE)):
            self._other(call, packet.__name__)

    def _other(self, call: Call, name: str) -> None:
        self.counts[Work(call.origin.layer, name, None, (), 0, _moved(call))] += 1

    def _product(self, call: Call) -> Work:
        operands = call.args[:2] if call.func.overloadpacket is GROUPED else call.args
        left, right = [arg for arg in operands if isinstance(arg, Tensor)][-2:]
        batch = left.shape[0] if left.dim() == 3 else 1  # groups are summed
        shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1])
        named = self._named(call, left, right)
        operands = (left.numel(), right.numel())
        return Work(*named, shape, 2 * math.prod(shape), _moved(call), operands=operands)

    def _named(self, call: Call, left: Tensor, right: Tensor) -> tuple[str, str, str | None]:
        """Return the layer, GEMM and type of a product."""
        tags = [tag for tag in map(self.tags.get, (left, right)) if tag]
        if call.func.overloadpacket is GROUPED:  # tags of the last expert, just before
            tags = list(self.tags.sides.values())
        layer = tags[0].layer if tags else call.origin.layer
        gemm = tags[0].site if tags else call.func.overloadpacket.__name__
        has_site = len(tags) == 2 and tags[0].site == tags[1].site
        if call.backward and not call.recomputed:
            # Only one operand of a product of attention without a type has passed a site.
            sites = ("dgrad", "wgrad", *(formats.ATTENTION_BACKWARD if has_site else ()))
            if gemm not in sites:  # a product of autograd
                node = torch._C._current_autograd_node()._sequence_nr()
                return layer, self._nodes.get(node, gemm) + OF_BACKWARD, None
        else:
            self._nodes.setdefault(torch.autograd._get_sequence_nr() - 1, gemm)
        if not has_site:
            return layer, gemm, None
        return layer, gemm, " x ".join(dict.fromkeys(tag.quant_type for tag in tags))

    def _attention(self, call: Call) -> Work:
        query, key, _ = _heads(call)
        backward = call.func.overloadpacket is BACKWARD_ATTENTION
        batch, heads, queries, width = query.shape
        shape = (batch * heads, queries, key.size(2), width)
        return Work(
            call.origin.layer,
            "fused attention" + OF_BACKWARD * backward,
            None if backward else self._attention_types(),
            shape,
            (5 if backward else 2) * 2 * math.prod(shape),
            _moved(call),
            masked=0.5 * _is_causal(call),
            operands=(query.numel(), key.numel()),
        )

    def _attention_types(self) -> str:
        """Return the types of the last operands of both sites of attention."""
        latest = [self.tags.latest[site] for site in ("qk", "pv") if site in self.tags.latest]
        named = [f"{tag.site} {tag.quant_type}" for tag in latest if tag.quant_type != "none"]
        return ", ".join(named) or "none"


BACKWARD_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu_backward
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    BACKWARD_ATTENTION,
}


def _heads(call: Call) -> list[Tensor]:
    first = 1 if call.func.overloadpacket is BACKWARD_ATTENTION else 0
    return list(call.args[first : first + 3])


def _is_causal(call: Call) -> bool:
    names = [argument.name for argument in call.func._schema.arguments]
    at = names.index("is_causal")
    return bool(call.args[at] if at < len(call.args) else call.kwargs.get("is_causal", False))


def _moved(call: Call) -> int:
    """Return the bytes that an operation reads and writes."""
    read = tensors([*call.args, *call.kwargs.values()])
    return sum(t.numel() * t.element_size() for t in (*read, *tensors(call.result)))
