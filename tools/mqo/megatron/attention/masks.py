"""Recognize a plain causal mask, for which a fused kernel needs no tensor."""

import torch
from torch import Tensor

ROWS = 256


def is_causal(mask: Tensor, queries: int, keys: int) -> bool:
    """Return whether `mask` hides exactly the later keys from each query; the last sees every key.

    mask: [..., queries, keys], True for a hidden key, as in Megatron. The answer is stored on the
    tensor until the tensor changes, because all layers get the same mask.
    """
    if mask.dtype != torch.bool or mask.shape[-2:] != (queries, keys):
        return False
    version = None if mask.is_inference() else mask._version
    known = getattr(mask, "mqo_causal", None)
    if known is None or known[0] != version:
        known = (version, _compare(mask, queries, keys))
        mask.mqo_causal = known  # type: ignore[attr-defined]
    return known[1]


def _compare(mask: Tensor, queries: int, keys: int) -> bool:
    """Compare a few rows at a time, without a second mask; synchronize with the device once."""
    columns = torch.arange(keys, device=mask.device)
    last = torch.arange(keys - queries, keys, device=mask.device)[:, None]
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    for start in range(0, queries, ROWS):
        rows = slice(start, start + ROWS)
        wrong |= (mask[..., rows, :] != (columns > last[rows])).any()
    return not wrong.item()
