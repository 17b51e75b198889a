"""Compute with torch what upstream's MambaMixer calls from mamba_ssm and causal_conv1d.

The functions have the names and arguments of those packages. What a training does not need, such as
packed sequences and the states of a generation, is refused by name.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from mqo.megatron.mamba.elementwise import GatedRMSNorm, causal_conv
from mqo.megatron.mamba.scan import chunk_scan

RMSNorm = GatedRMSNorm
_UNSET = (None, False, (0.0, math.inf))


class MambaError(RuntimeError):
    """An option of mamba_ssm or causal_conv1d that the torch implementation does not have."""


def are_needed(imported: bool) -> bool:
    """Return whether to use these functions: mamba_ssm is not `imported`, or torch lacks CUDA."""
    return not imported or not torch.cuda.is_available()


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: object,
) -> Tensor:
    """Return the activated convolution of x [batch, channels, tokens] with [channels, taps]."""
    _refuse("causal_conv1d_fn", options)
    y = causal_conv(x.transpose(1, 2), weight, bias)
    return _activated(y, activation).transpose(1, 2).to(x.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **options: object,
) -> Tensor:
    """Return the outputs of the scan, [batch, tokens, heads, width], in the dtype of x.

    Args:
        x: inputs, and z: their gates, [batch, tokens, heads, width].
        dt: step sizes [batch, tokens, heads], before dt_bias [heads] and, if set, the softplus.
        A: negative decay rates [heads].
        B: input projections, and C: output projections, [batch, tokens, groups, state].
        chunk_size: tokens of a chunk.
        D: factors of the inputs that are added to the outputs, [heads] or [heads, width].
        options: must be unset.
    """
    _refuse("mamba_chunk_scan_combined", options)
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    y = chunk_scan(x, softplus(steps) if dt_softplus else steps, A, B, C, chunk_size)
    if D is not None:
        y = y + x.float() * (D if D.dim() == 2 else D[:, None]).float()
    return (y if z is None else y * silu(z.float())).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    chunk_size: int,
    activation: str | None = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    **options: object,
) -> Tensor:
    """Return the gated outputs of the scan, [batch, tokens, heads * width].

    Args:
        zxbcdt: [batch, tokens, channels]: gates, inputs, input projections, output projections and
            step sizes, concatenated.
        headdim: the width of a head, if D does not have it.
        ngroups: number of groups of heads that share their projections.
        options: must be unset. The others are as in the functions above.
    """
    _refuse("mamba_split_conv1d_scan_combined", options)
    heads, width = D.size(0), headdim or D.size(-1)
    inner, channels = heads * width, conv1d_weight.size(0)
    z, xbc, dt = zxbcdt.split([inner, channels, heads], -1)
    xbc = _activated(causal_conv(xbc, conv1d_weight, conv1d_bias), activation).to(zxbcdt.dtype)
    x, b, c = xbc.split([inner, (channels - inner) // 2, (channels - inner) // 2], -1)
    x, z = x.unflatten(-1, (heads, width)), z.unflatten(-1, (heads, width))
    b, c = b.unflatten(-1, (ngroups, -1)), c.unflatten(-1, (ngroups, -1))
    y = mamba_chunk_scan_combined(x, dt, A, b, c, chunk_size, D, z, dt_bias, dt_softplus=True)
    return y.flatten(-2)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation not in (None, "silu", "swish"):
        raise MambaError(f"The activation of Mamba's convolution is {activation}. Expected: silu")
    return silu(y) if activation else y


def _refuse(function: str, options: Mapping[str, object]) -> None:
    """Raise MambaError if an option is set."""
    for name, value in options.items():
        if isinstance(value, Tensor) or value not in _UNSET:
            raise MambaError(
                f"{function} of mqo does not support {name}, which is needed for packed sequences "
                "and for generation with cached states. Expected: a training on sequences that are "
                "not packed, or the packages mamba_ssm and causal_conv1d on a GPU"
            )
