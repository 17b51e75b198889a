"""The amax of an operand, also if each tensor-parallel rank holds a shard."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF


class Shards(NamedTuple):
    """The operands of a layer of which the ranks of `group` hold shards."""

    operands: tuple[str, ...]
    group: torch.distributed.ProcessGroup


def is_shard(operand: str, shards: Shards | None) -> bool:
    """Return whether this rank holds only a shard of `operand`."""
    return shards is not None and operand in shards.operands


def shard_rank(operand: str, shards: Shards | None) -> int:
    """Return the number of this rank's shard of `operand`, 0 if it holds the whole."""
    return shards.group.rank() if shards and is_shard(operand, shards) else 0


def largest(x: Tensor) -> Tensor:
    """Return the amax of `x`, float32 []: NaN if `x` has a NaN, 0 if it is empty."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def shared_amax(x: Tensor, operand: str, shards: Shards | None) -> Tensor | None:
    """Return the amax of the operand of which `x` is a shard, float32 []; None if `x` is whole.

    It is a collective of the group, also for an empty shard: all ranks quantize the same operands
    of the same layers in the same order.
    """
    if shards is None or not is_shard(operand, shards):
        return None
    # As integers, the patterns of magnitudes have the same order, with Inf above numbers and NaN
    # above Inf; a maximum of floats may drop a NaN.
    pattern = largest(x).view(torch.int32) & _MAGNITUDE
    torch.distributed.all_reduce(pattern, torch.distributed.ReduceOp.MAX, group=shards.group)
    return pattern.view(torch.float32)
