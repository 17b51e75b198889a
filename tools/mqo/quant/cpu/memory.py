"""Which tensors' memory the kernels may use, and in what sizes."""

import torch
from torch import Tensor

ROW = 1 << 12  # elements of a row if the memory has no rows; a multiple of any block
GRAIN = 1 << 16  # elements that a thread takes at a time
NARROW = 16  # fewer adjacent columns than this are transposed first


def is_usable(x: Tensor) -> bool:
    """Return whether kernels may use the memory of `x`; not if traced, or of a subclass."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and not torch.compiler.is_compiling()
    )
