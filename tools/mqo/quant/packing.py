"""Pack quantized tensors into codes and scales, and unpack them."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mqo.quant.backend import (
    SPEC_SCHEMA,
    check_arguments,
    fake_quantize,
    fields_of,
    is_traced,
    spec_from_fields,
)
from mqo.quant.codes import code_values
from mqo.quant.formats import FORMATS, check_choice
from mqo.quant.reference import encode
from mqo.quant.scales import Stored, decode_factors, expand_scales, run_of, scales_of, stored_like
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import signed

_PART = 1 << 17  # elements
_MODERATE = 100  # limit of scale exponents: products with any value are then normal numbers
# Scales that are not powers of two, so that scaling a value is inexact.
_INEXACT_SCALES = ("fp32", "tensor", "one-level", "two-level")
_CONTIGUOUS = torch.contiguous_format
# {bits: the number of codes in a group that fills whole bytes, and the number of these bytes}
_GROUPS = {4: (2, 1), 6: (4, 3), 8: (1, 1)}


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A quantized tensor: the codes of its elements, and its scales.

    Attributes:
        codes: uint8 [..., ceil(size * bits / 8)], with `axis` moved last. Codes of 4 and 6 bits
            follow one another along that axis, each from the lowest free bit on; unused bits of the
            last byte are 0. A code is sign, exponent and mantissa as in OCP's tables (INT8: two's
            complement; INT4: sign and magnitude), or that of HiFloat8's table.
        scales: see `scales.Stored`; the codes of a block whose scale is NaN are 0.
        shape: of the packed tensor, and of the result of `unpack`.
        dtype: of both.
    """

    codes: Tensor
    scales: Stored
    shape: torch.Size
    dtype: torch.dtype
    spec: QuantSpec
    axis: int

    @property
    def nbytes(self) -> int:
        """The size of codes and scales in bytes."""
        return self.codes.nbytes + sum(part.nbytes for part in self.scales)

    @torch.no_grad()
    def unpack(self) -> Tensor:
        """Return the contiguous tensor, bit for bit the result of `fake_quantize`."""
        result = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        if is_traced(self.codes):
            stored = (*self.scales, self.axis, *fields_of(self.spec))
            torch.ops.megatron_quant.unpack(self.codes, result, *stored)
        else:
            _unpack(self.codes, result, self.scales, self.axis, self.spec)
        return result


@torch.no_grad()
def pack(
    x: Tensor,
    spec: QuantSpec,
    axis: int = -1,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> PackedTensor:
    """Quantize `x` as `fake_quantize`, but return codes and scales; raise what it raises.

    'none' is refused, too.

    Examples:
        >>> packed = pack(torch.ones(4, 64), QuantSpec("mxfp4"))
        >>> packed.codes.shape, packed.nbytes
        (torch.Size([4, 32]), 136)
        >>> packed.unpack().equal(torch.ones(4, 64))
        True
    """
    check_choice("packed type", spec.quant_type, tuple(FORMATS))
    check_arguments(x, spec, axis, seed)
    if is_traced(x):
        arguments = (x, amax, axis, signed(seed or 0), *fields_of(spec))
        codes, *scales = torch.ops.megatron_quant.pack(*arguments)
    else:
        codes, scales = _pack(x, spec, axis, seed, amax)
    axis = axis if spec.block else -1
    return PackedTensor(codes, Stored(*scales), x.shape, x.dtype, spec, axis)


def _pack(
    x: Tensor, spec: QuantSpec, axis: int, seed: int | None, amax: Tensor | None
) -> tuple[Tensor, Stored]:
    last = _last(x, spec, axis)
    scales = scales_of(last, spec, amax)
    if _recoverable(scales.decode, spec.format.scale in _INEXACT_SCALES):
        wide = x.to(working_dtype(x, spec.quant_type))
        rounded = fake_quantize(wide, spec, axis=axis, seed=seed, amax=amax)
        codes = _encoded(_last(rounded, spec, axis), scales.decode, spec)
    else:
        values = encode(x, spec, axis, seed, amax).values
        codes = _encoded(values.float(), torch.ones_like(scales.decode), spec)
    return codes, scales.stored


def working_dtype(x: Tensor, quant_type: str) -> torch.dtype:
    """Return the dtype of the temporary copy of `x` that `pack` makes."""
    is_wide = FORMATS[quant_type].scale in _INEXACT_SCALES or x.dtype == torch.float16
    return torch.float32 if is_wide else x.dtype


def _last(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """Return `x` with the axis of its blocks last."""
    return x.movedim(axis, -1) if x.dim() and spec.block else x


def _unpack(codes: Tensor, result: Tensor, scales: Stored, axis: int, spec: QuantSpec) -> None:
    """Write the values to `result`."""
    if not result.numel():
        return
    last = result.movedim(axis, -1) if result.dim() else result
    values = last if last.is_contiguous() else torch.empty_like(last, memory_format=_CONTIGUOUS)
    rows, size, run = _rows(values), values.shape[-1] if values.dim() else 1, run_of(spec)
    factors = decode_factors(scales, spec).float()
    factors = factors.expand(len(rows), -1) if run is None else _rows(factors)
    for part in _parts(rows):
        decoded = _decoded(_rows(codes)[part], spec.quant_type)[:, :size]
        rows[part] = decoded * expand_scales(factors[part], run, size)
    if values is not last:
        last.copy_(values)


def _recoverable(decode: Tensor, inexact: bool) -> bool:
    """Return whether float32 products with these scales identify the values: none is too extreme.

    Products with a power of two, and HiFloat4's, are exact even for the smallest scales.
    """
    low = 2.0**-_MODERATE if inexact else 0.0
    return not ((decode > 2.0**_MODERATE) | ((decode > 0) & (decode < low))).any()


def _encoded(rounded: Tensor, decode: Tensor, spec: QuantSpec) -> Tensor:
    """Return the codes [..., bytes] of rounded values [..., size] with these scales."""
    codes = _codes_like(rounded, spec)
    if not rounded.numel():
        return codes
    rows, target, run = _rows(rounded), _rows(codes), run_of(spec)
    size = rows.shape[1]
    inverse = torch.where(decode == 0, 1.0, 1 / decode).float()  # 1: a zero keeps its sign
    inverse = inverse.expand(len(rows), -1) if run is None else _rows(inverse)
    for part in _parts(rows):
        values = rows[part].float() * expand_scales(inverse[part], run, size)
        # A NaN comes from a block whose scale is NaN; formats without scales have a code for it.
        values = values if spec.format.scale == "none" else values.nan_to_num_(nan=0.0)
        target[part] = _joined(_codes(values, spec), spec.format.code_bits)[:, : target.shape[1]]
    return codes


def _codes_like(x: Tensor, spec: QuantSpec) -> Tensor:
    """Return an empty tensor for the codes of `x`, with blocks along the last axis."""
    shape = (*x.shape[:-1], -(-x.shape[-1] * spec.format.code_bits // 8)) if x.dim() else ()
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


def _codes(values: Tensor, spec: QuantSpec) -> Tensor:
    """Return the codes, int32, of values of a format, up to an error in float32's last bit."""
    patterns = values.bfloat16().view(torch.int16).int() & 0xFFFF
    table = _code_table(spec.quant_type, values.device)
    return table.index_select(0, patterns.flatten()).view(values.shape).int()


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Return codes [rows, elements] as bytes [rows, ...]."""
    return _regrouped(codes, *_GROUPS[bits], bits, 8).to(torch.uint8)


def _regrouped(parts: Tensor, count: int, other: int, bits: int, other_bits: int) -> Tensor:
    """Regroup `count` parts of `bits` bits, int32 [rows, parts], into `other` of `other_bits`."""
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[1] % count)).unflatten(1, (-1, count))
    words = (padded << bits * torch.arange(count, device=parts.device)).sum(-1, keepdim=True)
    cut: Tensor = words >> other_bits * torch.arange(other, device=parts.device)
    return (cut & (1 << other_bits) - 1).flatten(1)


def _rows(x: Tensor) -> Tensor:
    """Reshape `x` [..., size], not empty, to [rows, size]: a view, if it is contiguous."""
    return x.reshape(-1, x.shape[-1] if x.dim() else 1)


def _parts(rows: Tensor) -> Iterator[slice]:
    """Split rows into parts with small intermediate results."""
    step = max(1, _PART // max(1, rows.shape[1]))
    return (slice(first, first + step) for first in range(0, len(rows), step))


def _decoded(codes: Tensor, quant_type: str) -> Tensor:
    """Return the values [rows, elements] of codes [rows, bytes], float32."""
    bits = FORMATS[quant_type].code_bits
    count, size = _GROUPS[bits]
    elements = _regrouped(codes.int(), size, count, 8, bits)
    table = _value_table(quant_type, codes.device)
    return table.index_select(0, elements.flatten().int()).view(len(codes), -1)


@functools.cache
def _value_table(quant_type: str, device: torch.device) -> Tensor:
    """Return the values of all codes, float32."""
    return torch.tensor(code_values(quant_type), dtype=torch.float32, device=device)


@functools.cache
def _code_table(quant_type: str, device: torch.device) -> Tensor:
    """Return the code of each bfloat16 pattern, 0 if the format does not have its value.

    bfloat16 has the values of every format. If a value has several codes, the first is used.
    """
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.tensor(code_values(quant_type), dtype=torch.float32)
    codes = torch.zeros(1 << 16, dtype=torch.uint8)
    for code in reversed(range(len(values))):
        if values[code].isnan():
            codes[patterns.isnan()] = code
        else:
            pattern = int(values[code].bfloat16().view(torch.int16).item())
            codes[pattern & 0xFFFF] = code
    return codes.to(device)


# -- operators, for torch.compile and fake tensors; see backend.py ---------------------------------

_PACK, _UNPACK = "megatron_quant::pack", "megatron_quant::unpack"
_THREE = "(Tensor, Tensor, Tensor)"
torch.library.define(
    _PACK, f"(Tensor x, Tensor? amax, int axis, int seed, {SPEC_SCHEMA}) -> {_THREE}"
)
torch.library.define(
    _UNPACK,
    f"(Tensor codes, Tensor(a!) out, Tensor scales, Tensor total, int axis, {SPEC_SCHEMA}) -> ()",
)


@torch.library.impl(_PACK, "CompositeExplicitAutograd")
def _(x: Tensor, amax: Tensor | None, axis: int, seed: int, *fields: Any) -> tuple[Tensor, ...]:
    codes, scales = _pack(x, spec_from_fields(*fields), axis, seed % 2**64, amax)
    return codes, *scales


@torch.library.impl(_UNPACK, "CompositeExplicitAutograd")
def _(codes: Tensor, out: Tensor, scales: Tensor, total: Tensor, axis: int, *fields: Any) -> None:
    _unpack(codes, out, Stored(scales, total), axis, spec_from_fields(*fields))


def _fake_pack(x: Tensor, _: object, axis: int, seed: int, *fields: Any) -> tuple[Tensor, ...]:
    spec = spec_from_fields(*fields)
    last = _last(x, spec, axis)
    return _codes_like(last, spec), *stored_like(last, spec)


torch.library.register_fake(_PACK, _fake_pack)
torch.library.register_fake(_UNPACK, lambda *_: None)
