"""Quantised tensors as their codes and scales: what the formats take in storage."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import check_arguments
from .formats import REFERENCE_TYPES, SCALE_BIAS, check_choice, code_values
from .reference import Encoded, decode, encode
from .spec import QuantSpec


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A quantised tensor: the codes of its elements, and its scales.

    codes: uint8, of the tensor with `axis` moved last, [..., size]. mxfp4 has two codes a byte
        along that axis, [..., ceil(size / 2)], the first one in the low four bits; the last high
        four bits of an odd size are 0.
    scales: uint8 [..., ceil(size / block)], E8M0: byte b is 2^(b - 127), and 255 is NaN, a block
        whose codes are 0. hifp8 has one, [1], with a tensor scale and else none, [0].
    shape, dtype: of the tensor that was packed, and of what `unpack` returns.
    """

    codes: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype
    spec: QuantSpec
    axis: int

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @torch.no_grad()
    def unpack(self) -> Tensor:
        """Return the tensor, contiguous: bit for bit what quantise_dequantise makes of it."""
        codes = self.codes
        if self.spec.quant_type == "mxfp4":
            size = self.shape[self.axis]
            codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)[..., :size]
        values = _values(self.spec.quant_type).to(codes.device)[codes.long()]
        tensor = decode(Encoded(values, self.scales.long() - SCALE_BIAS), self.spec)
        return tensor.movedim(-1, self.axis).to(self.dtype).contiguous()


@torch.no_grad()
def pack(x: Tensor, spec: QuantSpec, axis: int = -1, seed: int | None = None) -> PackedTensor:
    """Quantise `x` as quantise_dequantise does, and keep codes and scales; raises what it raises.

    'none' is refused, too.
    """
    check_choice("packed type", spec.quant_type, REFERENCE_TYPES[1:])
    check_arguments(x, spec, axis, seed)
    values, exponents = encode(x, spec, axis, seed)
    codes = _codes_of(values, spec.quant_type)
    if spec.quant_type == "mxfp4":
        codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    axis = -1 if spec.quant_type == "hifp8" else axis
    scales = (exponents + SCALE_BIAS).to(torch.uint8)
    return PackedTensor(codes.contiguous(), scales, x.shape, x.dtype, spec, axis)


def _codes_of(values: Tensor, quant_type: str) -> Tensor:
    """Return the codes of float64 `values` of a format, which are exactly its own."""
    table = _values(quant_type).to(values.device)
    sign_bit = len(table) // 2
    magnitudes, codes = table[:sign_bit].sort()
    special = values.isnan()  # hifp8's, whose code is where -0 would be
    found = torch.searchsorted(magnitudes, torch.where(special, 0.0, values.abs()).contiguous())
    codes = codes[found] + sign_bit * (values.signbit() | special)
    return codes.to(torch.uint8)


@functools.cache
def _values(quant_type: str) -> Tensor:
    return torch.tensor(code_values(quant_type), dtype=torch.float64)
