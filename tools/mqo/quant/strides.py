"""The memory layout of a tensor."""

from collections.abc import Sequence

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Return the axes of `x` from the slowest to the fastest in memory."""
    axes = range(x.dim())
    if x.is_contiguous():  # axes of one element can have any stride
        return list(axes)
    return sorted(axes, key=lambda i: x.stride(i), reverse=True)


def permute_back(x: Tensor, order: Sequence[int]) -> Tensor:
    """Undo `permute(order)`."""
    return x.permute([order.index(axis) for axis in range(x.dim())])


def flat(x: Tensor) -> Tensor:
    """Return a view of a dense tensor with one axis, in the order of memory."""
    return x.permute(memory_order(x)).flatten()


def is_dense(x: Tensor) -> bool:
    """Return whether `x` fills its memory without gaps and overlaps."""
    return x.permute(memory_order(x)).is_contiguous()
