"""Convert operands under autocast, as torch does for its own products."""

import torch
from torch import Tensor


def autocasted(*operands: Tensor | None) -> list[Tensor | None]:
    """Return the operands in the dtype of autocast on the first one's device, if it is enabled."""
    first = operands[0]
    assert first is not None
    if not torch.is_autocast_enabled(first.device.type):
        return list(operands)
    dtype = torch.get_autocast_dtype(first.device.type)
    return [None if operand is None else operand.to(dtype) for operand in operands]
