"""Counts what a rank exchanges with others: operation, group, calls, bytes."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mqo.megatron.simulation.memory import tensors
from mqo.megatron.simulation.watch import Call

# {operation of c10d: (its name here, whose bytes count: what is taken or what is made)}
_NAMES = {
    "broadcast_": "broadcast",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "reduce_": "reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "allgather_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "recv_": "receive",
}


class Exchange(NamedTuple):
    """A kind of exchange: `size` are the bytes of the whole, on one rank.

    `ranks` is the size of the group, and the number of nodes that it spans. `overlapped` says that
    it runs during computation, as upstream's flags select.
    """

    operation: str
    group: str
    ranks: int
    nodes: int
    size: int

    @property
    def wire(self) -> int:
        """Bytes that a rank sends, by a ring."""
        share = (self.ranks - 1) / self.ranks
        parts = {"all-reduce": 2 * share, "broadcast": 1, "send": 1, "receive": 0, "reduce": 1}
        return int(self.size * parts.get(self.operation, share))


@dataclass
class Collectives:
    """An observer of torch.distributed's operations. `per_node` is how many ranks a node has."""

    per_node: int
    found: Counter[Exchange] = field(default_factory=Counter)

    def __call__(self, call: Call) -> None:
        """Count an exchange."""
        if call.func is None or call.func.namespace != "c10d":
            return
        name = _NAMES.get(call.func.overloadpacket.__name__)
        if name is None:
            return
        group = next(g for g in map(_group, call.args) if g is not None)
        if group.size() == 1:
            return
        ranks = torch.distributed.get_process_group_ranks(group)
        nodes = len({rank // self.per_node for rank in ranks})
        found = Exchange(name, _label(group), len(ranks), nodes, _bytes(name, call.args))
        self.found[found] += 1


def _bytes(name: str, args: tuple) -> int:
    """Return the bytes of the whole: for all-gather what is made of all parts."""
    sizes = [
        sum(t.numel() * t.element_size() for t in tensors(arg))
        for arg in args
        if isinstance(arg, Tensor) or (isinstance(arg, list) and arg)
    ]
    sizes = [size for size in sizes if size] or [0]
    return max(sizes) if name in ("all-gather", "reduce-scatter", "scatter") else sizes[0]


def _group(arg: Any) -> ProcessGroup | None:
    try:
        return ProcessGroup.unbox(arg)
    except (RuntimeError, TypeError, ValueError):
        return None


def _label(group: ProcessGroup) -> str:
    """Return the group's name as upstream describes it, in its short form."""
    return group.group_desc or "undefined"
