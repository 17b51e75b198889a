"""The memory layout of a tensor."""

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Return the axes of `x` from the slowest to the fastest in memory."""
    axes = range(x.dim())
    if x.is_contiguous():  # the strides of axes of one element may be any
        return list(axes)
    return sorted(axes, key=lambda i: x.stride(i), reverse=True)


def is_dense(x: Tensor) -> bool:
    """Return whether `x` fills its piece of memory, without gaps or anything twice."""
    return x.permute(memory_order(x)).is_contiguous()
