"""Quantized tensors as their codes and scales: what the formats take in storage."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import check_arguments, fake_quantize
from .codes import code_values
from .formats import FORMATS, check_choice
from .reference import encode
from .scales import Stored, decode_factors, run_of, scales_of, spread
from .spec import QuantSpec

_PART = 1 << 17  # elements
_MODERATE = 100  # exponents of scales whose products with any value are normal numbers
# Codes that begin at a byte's first bit together, and the bytes that they fill.
_GROUPS = {4: (2, 1), 6: (4, 3), 8: (1, 1)}


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A quantized tensor: the codes of its elements, and its scales.

    codes: uint8, of the tensor with `axis` moved last, [..., ceil(size * bits / 8)]. Codes of 4 and
        6 bits lie one behind the other along that axis, each from the lowest free bit on; what the
        last byte has left is 0.
    scales: see `scales.Stored`: the codes of a block whose scale is NaN are 0.
    shape, dtype: of the tensor that was packed, and of what `unpack` returns.
    """

    codes: Tensor
    scales: Stored
    shape: torch.Size
    dtype: torch.dtype
    spec: QuantSpec
    axis: int

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales."""
        return self.codes.nbytes + sum(part.nbytes for part in self.scales)

    @torch.no_grad()
    def unpack(self) -> Tensor:
        """Return the tensor, contiguous: bit for bit what fake_quantize makes of it."""
        size = self.shape[self.axis] if self.shape else 1
        shape = (*self.codes.shape[:-1], size) if self.shape else self.shape
        result = torch.empty(shape, dtype=self.dtype, device=self.codes.device)
        if result.numel():
            rows, codes = _rows(result), _rows(self.codes)
            factors = decode_factors(self.scales, self.spec).float()
            run = run_of(self.spec)
            factors = factors.expand(len(rows), -1) if run is None else _rows(factors)
            for part in _parts(rows):
                values = _decoded(codes[part], self.spec.quant_type)[:, :size]
                rows[part] = values * spread(factors[part], run, size)
        return result.movedim(-1, self.axis).contiguous() if self.shape else result


@torch.no_grad()
def pack(
    x: Tensor,
    spec: QuantSpec,
    axis: int = -1,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> PackedTensor:
    """Quantize `x` as fake_quantize does, and keep codes and scales; raises what it raises.

    'none' is refused, too.
    """
    check_choice("packed type", spec.quant_type, tuple(FORMATS))
    check_arguments(x, spec, axis, seed)
    last = x.movedim(axis, -1) if x.dim() and spec.block else x
    scales = scales_of(last, spec, amax)
    inexact = spec.format.scale in ("fp32", "tensor", "two-level")
    if _recoverable(scales.decode, inexact):
        # What is no multiple of a few bits and a power of two only float32 holds.
        wide = x.float() if inexact or x.dtype == torch.float16 else x
        rounded = fake_quantize(wide, spec, axis=axis, seed=seed, amax=amax)
        rounded = rounded.movedim(axis, -1) if x.dim() and spec.block else rounded
        codes = _encoded(rounded, scales.decode, spec)
    else:
        values = encode(x, spec, axis, seed, amax).values
        codes = _encoded(values.float(), torch.ones_like(scales.decode), spec)
    axis = axis if spec.block else -1
    return PackedTensor(codes, scales.stored, x.shape, x.dtype, spec, axis)


def _recoverable(decode: Tensor, inexact: bool) -> bool:
    """Whether a value times its scale, in float32, tells the value: no product is too near an end.

    Products with a power of two, and HiFloat4's, are exact down to the smallest ones.
    """
    low = 2.0**-_MODERATE if inexact else 0.0
    return not ((decode > 2.0**_MODERATE) | ((decode > 0) & (decode < low))).any()


def _encoded(rounded: Tensor, decode: Tensor, spec: QuantSpec) -> Tensor:
    """Return the codes [..., bytes] of what was rounded [..., size] under these scales."""
    size = rounded.shape[-1] if rounded.dim() else 1
    shape = (*rounded.shape[:-1], -(-size * spec.format.code_bits // 8))
    shape = shape if rounded.dim() else rounded.shape
    codes = torch.empty(shape, dtype=torch.uint8, device=rounded.device)
    if not rounded.numel():
        return codes
    rows, target, run = _rows(rounded), _rows(codes), run_of(spec)
    inverse = torch.where(decode == 0, 1.0, 1 / decode).float()  # 1: a zero keeps its sign
    inverse = inverse.expand(len(rows), -1) if run is None else _rows(inverse)
    for part in _parts(rows):
        values = rows[part].float() * spread(inverse[part], run, size)
        # An element that is not a number is one of a block that has no scale; without scales, there
        # is a code for it.
        values = values if spec.format.scale == "none" else values.nan_to_num_(nan=0.0)
        target[part] = _joined(_codes(values, spec), spec.format.code_bits)[:, : target.shape[1]]
    return codes


def _codes(values: Tensor, spec: QuantSpec) -> Tensor:
    """Return the codes, int32, of a format's own values, give or take a float32's last bit."""
    patterns = values.bfloat16().view(torch.int16).int() & 0xFFFF
    table = _code_table(spec.quant_type, values.device)
    return table.index_select(0, patterns.flatten()).view(values.shape).int()


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Return codes [rows, elements] as bytes [rows, ...]."""
    return _regrouped(codes, *_GROUPS[bits], bits, 8).to(torch.uint8)


def _regrouped(parts: Tensor, count: int, other: int, bits: int, other_bits: int) -> Tensor:
    """Cut `count` parts of `bits` each, int32, [rows, parts], into `other` of `other_bits`."""
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[1] % count)).unflatten(1, (-1, count))
    words = (padded << bits * torch.arange(count, device=parts.device)).sum(-1, keepdim=True)
    cut = words >> other_bits * torch.arange(other, device=parts.device)
    return (cut & (1 << other_bits) - 1).flatten(1)


def _rows(x: Tensor) -> Tensor:
    """Return `x` [..., size], not empty, as [rows, size]: its own memory, if it is contiguous."""
    return x.reshape(-1, x.shape[-1] if x.dim() else 1)


def _parts(rows: Tensor) -> Iterator[slice]:
    """Cut rows into parts whose intermediate results stay small."""
    step = max(1, _PART // max(1, rows.shape[1]))
    return (slice(first, first + step) for first in range(0, len(rows), step))


def _decoded(codes: Tensor, quant_type: str) -> Tensor:
    """Return the values [rows, elements] of codes [rows, bytes], float32."""
    bits = FORMATS[quant_type].code_bits
    count, size = _GROUPS[bits]
    found = _regrouped(codes.int(), size, count, 8, bits)
    table = _value_table(quant_type, codes.device)
    return table.index_select(0, found.flatten().int()).view(len(codes), -1)


@functools.cache
def _value_table(quant_type: str, device: torch.device) -> Tensor:
    """Return the value of every code, float32."""
    return torch.tensor(code_values(quant_type), dtype=torch.float32, device=device)


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
