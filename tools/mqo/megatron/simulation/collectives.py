"""Count what a rank exchanges with others: operation, group, calls, bytes."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mqo.megatron.simulation.memory import tensors
from mqo.megatron.simulation.rows import Exchange
from mqo.megatron.simulation.watch import Call

# {operation of c10d: its name here}
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


@dataclass
class Collectives:
    """An observer that counts exchanges. `per_node` is the number of ranks per node."""

    per_node: int
    counts: Counter[Exchange] = field(default_factory=Counter)

    def __call__(self, call: Call) -> None:
        """Count the call if it is an exchange."""
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
        exchange = Exchange(name, _label(group), len(ranks), nodes, _bytes(name, call.args))
        self.counts[exchange] += 1


def _bytes(name: str, args: tuple) -> int:
    """Return the bytes of the whole tensor: for all-gather, of its result."""
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
    """Return upstream's short description of the group."""
    return group.group_desc or "undefined"
