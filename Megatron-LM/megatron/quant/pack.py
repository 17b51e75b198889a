"""Quantized tensors as their codes and scales: what the formats take in storage."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import check_arguments, fake_quantize
from .codes import code_values
from .formats import FORMATS, SCALE_BIAS, SCALE_EXPONENT_NAN, check_choice
from .reference import scale_exponents
from .spec import QuantSpec

_PART = 1 << 17  # elements
_LARGEST_EXPONENT = 16  # of all formats' values, rounded up


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A quantized tensor: the codes of its elements, and its scales.

    codes: uint8, of the tensor with `axis` moved last, [..., size]. A format of 4 bits has two
        codes a byte along that axis, [..., ceil(size / 2)], the first one in the low four bits; the
        last high four bits of an odd size are 0.
    scales: uint8 [..., ceil(size / block)], E8M0: byte b is 2^(b - 127), and 255 is NaN, a block
        whose codes are 0. A format without blocks has one, [1], with a tensor scale and else [0].
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
        """Return the tensor, contiguous: bit for bit what fake_quantize makes of it."""
        size = self.shape[self.axis] if self.shape else 1
        shape = (*self.codes.shape[:-1], size) if self.shape else self.shape
        result = torch.empty(shape, dtype=self.dtype, device=self.codes.device)
        if result.numel():
            rows, codes = _rows(result), _rows(self.codes)
            scales = _by_row(_scale_of(self.scales).float(), len(rows), self.spec)
            for part in _parts(rows):
                values = _decoded(codes[part], self.spec.quant_type)[:, :size]
                rows[part] = _scaled(values, scales[part], self.spec)
        return result.movedim(-1, self.axis).contiguous() if self.shape else result


@torch.no_grad()
def pack(x: Tensor, spec: QuantSpec, axis: int = -1, seed: int | None = None) -> PackedTensor:
    """Quantize `x` as fake_quantize does, and keep codes and scales; raises what it raises.

    'none' is refused, too.
    """
    check_choice("packed type", spec.quant_type, tuple(FORMATS))
    check_arguments(x, spec, axis, seed)
    # float16 does not hold every result, float32 all but those that round up to 2^128.
    wide = x.float() if x.dtype == torch.float16 else x
    rounded = fake_quantize(wide, spec, axis=axis, seed=seed)
    axis = axis if spec.block else -1
    exponents = scale_exponents(x, spec, axis)
    codes = _encoded(rounded.movedim(axis, -1) if x.dim() else rounded, exponents, spec)
    scales = (exponents + SCALE_BIAS).to(torch.uint8)
    return PackedTensor(codes, scales, x.shape, x.dtype, spec, axis)


def _encoded(rounded: Tensor, exponents: Tensor, spec: QuantSpec) -> Tensor:
    """Return the codes [..., bytes] of what was rounded [..., size] under these scales."""
    two = spec.format.codes_per_byte == 2
    shape = (*rounded.shape[:-1], -(-rounded.shape[-1] // 2)) if two else rounded.shape
    codes = torch.empty(shape, dtype=torch.uint8, device=rounded.device)
    if not rounded.numel():
        return codes
    rows, target = _rows(rounded), _rows(codes)
    exponents = _by_row(exponents, len(rows), spec)
    table = _code_table(spec.quant_type, rounded.device)
    for part in _parts(rows):
        values = _unscaled(rows[part].float(), exponents[part], spec)
        patterns = values.bfloat16().view(torch.int16).int() & 0xFFFF
        found = table.index_select(0, patterns.flatten()).view(values.shape)
        if two:
            found = torch.nn.functional.pad(found, (0, found.shape[1] % 2))
            found = found[:, 0::2] | found[:, 1::2] << 4
        target[part] = found
    return codes


def _rows(x: Tensor) -> Tensor:
    """Return `x` [..., size], not empty, as [rows, size]: its own memory, if it is contiguous."""
    return x.reshape(-1, x.shape[-1] if x.dim() else 1)


def _unscaled(rounded: Tensor, exponents: Tensor, spec: QuantSpec) -> Tensor:
    """Return the format's own values [rows, size] of float32 `rounded`; 0 where the scale is NaN.

    An infinity that the scale alone brought about, by rounding up to 2^128, becomes its value.
    """
    if not exponents.numel():
        return rounded
    inverse = torch.exp2(-exponents.double()).float()
    values = _scaled(rounded, inverse, spec)
    if exponents.max() > 127 - _LARGEST_EXPONENT:
        top = torch.exp2(128 - exponents.double()).float()
        values = torch.where(rounded.isinf(), _scaled(rounded.sign(), top, spec), values)
    # An element that is not a number is one of a block that has no scale; where there are no
    # blocks, there is a code for it.
    return values.nan_to_num_(nan=0.0) if spec.block else values


def _scaled(values: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """Multiply each block of `values` [rows, size] by its scale [rows, blocks]."""
    if not scales.numel():
        return values
    if spec.block is None:
        return values * scales
    rows, size = values.shape
    spread = scales.unsqueeze(-1).expand(-1, -1, spec.block).reshape(rows, -1)
    return values * spread[:, :size]


def _by_row(scales: Tensor, rows: int, spec: QuantSpec) -> Tensor:
    """Return scales as [rows, scales of a row]; a tensor's one scale is every row's."""
    if spec.block is None:
        return scales.expand(rows, -1) if scales.numel() else scales.view(1, 0).expand(rows, 0)
    return scales.reshape(rows, -1)


def _parts(rows: Tensor) -> Iterator[slice]:
    """Cut rows into parts whose intermediate results stay small."""
    step = max(1, _PART // max(1, rows.shape[1]))
    return (slice(first, first + step) for first in range(0, len(rows), step))


def _scale_of(scales: Tensor) -> Tensor:
    """Return the E8M0 scales' values, float64."""
    exponents = scales.double() - SCALE_BIAS
    return torch.where(exponents == SCALE_EXPONENT_NAN, torch.nan, torch.exp2(exponents))


def _decoded(codes: Tensor, quant_type: str) -> Tensor:
    """Return the values [rows, elements] of codes [rows, bytes], float32."""
    table = _value_table(quant_type, codes.device)
    return table.index_select(0, codes.flatten().int()).view(len(codes), -1)


@functools.cache
def _value_table(quant_type: str, device: torch.device) -> Tensor:
    """Return the values of every byte [256, 1], or [256, 2] where it holds two codes."""
    values = torch.tensor(code_values(quant_type), dtype=torch.float32)
    if FORMATS[quant_type].codes_per_byte == 1:
        return values.unsqueeze(1).to(device)
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1).to(device)


@functools.cache
def _code_table(quant_type: str, device: torch.device) -> Tensor:
    """Return the code of each bfloat16 pattern that is one of the format's values, else 0.

    Every format's values are a bfloat16's. Of the codes of one value the first counts.
    """
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.tensor(code_values(quant_type), dtype=torch.float32)
    codes = torch.zeros(1 << 16, dtype=torch.uint8)
    for code in reversed(range(len(values))):
        if values[code].isnan():
            codes[patterns.isnan()] = code
        else:
            codes[values[code].bfloat16().view(torch.int16).int().item() & 0xFFFF] = code
    return codes.to(device)
