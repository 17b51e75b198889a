"""What surrounds the scan of Mamba-2: a short convolution before it, a gated norm after it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution [batch, tokens, channels] of each channel with its own taps, in fp32.

    A token sees itself and the taps - 1 tokens before it. The sum of shifted products is faster
    than torch's convolution with one group per channel.

    Args:
        x: [batch, tokens, channels].
        weight: [channels, taps]; the last tap belongs to the token itself.
        bias: [channels], or None.
    """
    tokens, taps = x.size(1), weight.size(1)
    padded, weight = pad(x.float(), (0, 0, taps - 1, 0)), weight.float()
    shifted = (padded[:, i : i + tokens] * weight[:, i] for i in range(taps))
    return sum(shifted, torch.zeros((), device=x.device) if bias is None else bias.float())


class GatedRMSNorm(torch.nn.Module):
    """RMS norm of groups of channels, with a gate; has the interface of mamba_ssm's RMSNorm."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        **tensor: Any,
    ) -> None:
        """Create the weight [hidden_size]; `tensor` are its device and dtype."""
        super().__init__()
        self.eps, self.group_size = eps, group_size or hidden_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **tensor))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return norm(x) * silu(z), or norm(x * silu(z)) without norm_before_gate; z may be None.

        Args:
            x: [..., hidden_size]. The result has its dtype; it is computed in fp32.
            z: the gate, with the shape of x.
        """
        y, gate = x.float(), None if z is None else silu(z.float())
        if gate is not None and not self.norm_before_gate:
            y = y * gate
        groups = y.unflatten(-1, (-1, self.group_size))
        scale = (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        y = (groups * scale).flatten(-2) * self.weight.float()
        return (y if gate is None or not self.norm_before_gate else y * gate).to(x.dtype)
