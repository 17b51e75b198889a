"""Whose memory the kernels may use, and in what pieces they take it."""

import torch
from torch import Tensor

ROW = 1 << 12  # elements of a row where the memory has no rows of its own; a multiple of any block
GRAIN = 1 << 16  # elements that a thread takes at a time
NARROW = 16  # fewer columns than this side by side are turned into rows first


def is_plain(x: Tensor) -> bool:
    """Return whether the memory of `x` can be used: not when traced, nor in a subclass."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and not torch.compiler.is_compiling()
    )
