"""The scan of Mamba-2: a recurrence over tokens, computed in chunks by matrix products.

Per head, the state S [state, width] and the output y [width] of token t are

    S_t = exp(dt_t * a) * S_(t-1) + dt_t * outer(b_t, x_t)        y_t = c_t @ S_t

Within a chunk this is attention without a softmax: the score c_i @ b_j, times the decay between
the tokens. Only the state at the end of a chunk reaches the next one. Source: Dao and Gu,
"Transformers are SSMs" (2024), section 6.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def chunk_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Return the outputs [batch, tokens, heads, width] of the scan, in fp32.

    Args:
        x: inputs [batch, tokens, heads, width].
        dt: positive step sizes [batch, tokens, heads].
        a: negative decay rates [heads].
        b: input projections [batch, tokens, groups, state]; heads / groups heads share one.
        c: output projections, with the shape of b.
        chunk: tokens of a chunk. The result does not depend on it, except for rounding.
    """
    batch, tokens, heads, width = x.shape
    groups, chunk = b.size(2), min(chunk, tokens)
    # A padded token has dt = 0: it adds nothing to the state, and does not decay it.
    x, dt, b, c = (_chunks(tensor.float(), chunk) for tensor in (x, dt, b, c))
    x = (x * dt[..., None]).unflatten(3, (groups, -1))
    # [batch, chunks, groups, heads of a group, chunk]: log of each token's decay
    decay = (dt * a.float()).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2)
    between, from_start = _between(decay), decay.cumsum(-1).exp()
    to_end = between[..., -1, :].permute(0, 1, 4, 2, 3)
    scores = torch.einsum("zkign,zkjgn->zkgij", c, b)
    within = torch.einsum("zkghij,zkjghw->zkighw", scores[:, :, :, None] * between, x)
    added = torch.einsum("zkjgn,zkjghw->zkghnw", b, x * to_end[..., None])
    entering = _entering(added, from_start[..., -1])
    across = torch.einsum("zkign,zkghnw->zkighw", c, entering)
    y = within + across * from_start.permute(0, 1, 4, 2, 3)[..., None]
    return y.reshape(batch, -1, heads, width)[:, :tokens]


def _chunks(tensor: Tensor, chunk: int) -> Tensor:
    """Return [batch, tokens, ...] as [batch, chunks, chunk, ...], padded with zeros."""
    missing = -tensor.size(1) % chunk
    padding = [0, 0] * (tensor.dim() - 2) + [0, missing]
    return pad(tensor, padding).unflatten(1, (-1, chunk))


def _between(decay: Tensor) -> Tensor:
    """Return by how much [..., i, j] the input of token j decays until token i; 0 for later j.

    Each sum has only the terms after j. A difference of two sums from the chunk's start would lose
    up to three digits, because both can be large.
    """
    size = decay.size(-1)
    ones = torch.ones(size, size, dtype=torch.bool, device=decay.device)
    after_j = decay[..., None].expand(*decay.shape, size).masked_fill(ones.triu(), 0)
    return after_j.cumsum(-2).masked_fill(ones.triu(1), -torch.inf).exp()


def _entering(added: Tensor, decay: Tensor) -> Tensor:
    """Return the state before each chunk.

    Args:
        added: what each chunk adds to the state, [batch, chunks, ..., state, width].
        decay: by which factor the state decays in each chunk, [batch, chunks, ...].
    """
    state = torch.zeros_like(added[:, 0])
    states = []
    for own, factor in zip(added.unbind(1), decay.unbind(1), strict=True):
        states.append(state)
        state = factor[..., None, None] * state + own
    return torch.stack(states, 1)
