"""Attention by torch's fused kernels, which never hold the s x s scores."""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

# Without MATH, which would silently allocate the scores if no kernel fits.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, dropout: float = 0.0
) -> Tensor:
    """Compute attention of grouped queries in Megatron's layout, differentiable.

    Args:
        query: [sq, b, np, hn].
        key: [sk, b, ng, hn]; np is a multiple of ng.
        value: [sk, b, ng, hv]; hv may differ from hn.
        scale: factor of the scores.
        causal: whether the queries have the last positions, and each sees the keys up to its own.
        dropout: share of the probabilities to drop, with the device's default generator.

    Returns:
        [sq, b, np * hv].

    Raises:
        RuntimeError: no fused kernel of this device supports these tensors, or dropout on a CPU.
    """
    width = value.size(-1)
    # Flash kernels need one head size. Zeros add nothing to a score; their context is dropped.
    widest = max(width, query.size(-1))
    heads = [pad(t, (0, widest - t.size(-1))).permute(1, 2, 0, 3) for t in (query, key, value)]
    grouped = query.size(2) != key.size(2)
    if grouped and not _takes_groups(heads, dropout, causal):
        repeats = query.size(2) // key.size(2)
        heads[1:] = [t.repeat_interleave(repeats, dim=1) for t in heads[1:]]
        grouped = False
    last = _last_rows(query, key) if causal and query.size(0) != key.size(0) else None
    with sdpa_kernel(KERNELS):
        context = scaled_dot_product_attention(
            *(heads[0], heads[1], heads[2]),
            attn_mask=last,
            dropout_p=dropout,
            is_causal=causal and last is None,
            scale=scale,
            enable_gqa=grouped,
        )
    context = context[..., :width].permute(2, 0, 1, 3)
    return context.reshape(*context.shape[:2], -1)


def _last_rows(query: Tensor, key: Tensor) -> Tensor:
    """Return the causal bias of the last queries; only the CPU needs a tensor for it."""
    sizes = query.size(0), key.size(0)
    if query.device.type == "cuda":
        # Imported here, because it imports torch's compiler.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(*sizes)
    seen = torch.ones(sizes, dtype=torch.bool, device=query.device)
    return seen.tril(sizes[1] - sizes[0])


def _takes_groups(heads: list[Tensor], dropout: float, causal: bool) -> bool:
    """Return whether a kernel supports grouped queries: all but CUDA's for fp32 do."""
    if heads[0].device.type != "cuda":
        return True
    query, key, value = heads
    return can_use_flash_attention(SDPAParams(query, key, value, None, dropout, causal, True))
