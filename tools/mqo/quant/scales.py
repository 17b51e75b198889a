"""The definitions of the scales of every format.

If a definition uses float32, this code computes in float64 and rounds each result to float32: for a
single operation on two float32 values, this equals float32 arithmetic.
"""

import ctypes
import math
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mqo.quant.formats import (
    ELEMENTS,
    SCALE_BIAS,
    SCALE_EXPONENT_MAX,
    SCALE_EXPONENT_MIN,
    SCALE_EXPONENT_NAN,
    Minifloat,
    minifloat,
)
from mqo.quant.spec import QuantSpec
from mqo.quant.strides import memory_order, permute_back
from mqo.quant.tensor_amax import largest

_LARGEST = torch.finfo(torch.float32).max
_NONE = torch.empty(0, dtype=torch.float32)
_E4M3 = minifloat(ELEMENTS["e4m3"])
FOUR = 1.5  # the scale that maps an amax to 4, in units of the one that maps it to 6
ERROR_BITS = 19  # of the fraction of an element's error
# The scale of HiFloat4, E6M2: 2^-48 .. 49152, and the code 255 for NaN.
E6M2 = Minifloat("e6m2", 8, 15, -48, 2, 49152.0)
_HIF4_RUN = 4  # elements that share all three of its scales


class Stored(NamedTuple):
    """The scales in storage.

    block: uint8 (the code of E8M0, E4M3 or UE5M3; 255 is NaN) or float32 (the factor after
        rounding) [..., blocks]; [1] for the power of two of a tensor, and [0] without block scales.
        hif4 has [..., blocks, 4]: the code of E6M2, and 24 bits, from the lowest on, that say which
        factors of 8 and then of 4 elements are 2.
    tensor: float32 [1], the factor of the tensor after rounding (of two levels without that of the
        block), or [0]; NaN if the tensor has no finite amax.
    """

    block: Tensor
    tensor: Tensor


class Scales(NamedTuple):
    """The factors of the elements of a tensor [..., size] before and after rounding.

    encode, decode: float64 [..., runs] with float32 values; NaN if the amax is not finite. The
        scale of a tensor is [1].
    run: the number of elements along the last axis that share a factor; None if all do.
    """

    encode: Tensor
    decode: Tensor
    run: int | None
    stored: Stored


def scales_of(x: Tensor, spec: QuantSpec, amax: Tensor | None = None) -> Scales:
    """Return the scales of `x` [..., size], with blocks along the last axis.

    `amax`, float32 [], determines the scale of the tensor; None for the amax of `x`.
    """
    stored, encode = _FIND[spec.format.scale](x, spec, amax)
    return Scales(encode, decode_factors(stored, spec), run_of(spec), stored)


def run_of(spec: QuantSpec) -> int | None:
    """Return the number of elements in a row that share all their scales; None for all."""
    return _HIF4_RUN if spec.format.scale == "hif4" else spec.block


def carry_of(spec: QuantSpec) -> int:
    """Return the number that, added to amax's float32 pattern, carries if the scale rounds up.

    It applies to `e8m0`, and to `power-of-two`, whose largest scale that keeps amax within the
    element's range is that of the rule 'rceil'. It is 0 for other kinds.
    """
    element, unit = spec.format.minifloat, 1 << 23
    fraction = int((element.max_value / 2.0**element.emax - 1.0) * unit)
    carries = {
        "floor": 0,
        "rceil": unit - 1 - fraction,
        "ceil": unit - 1,
        "even": unit >> (element.mantissa_bits + 1),
    }
    return carries.get("rceil" if spec.format.scale == "power-of-two" else spec.scale_rule, 0)


def largest_scale(spec: QuantSpec) -> float:
    """Return the block scale, before it is rounded, of a block with the amax of the tensor.

    It is 448 also for UE5M3, whose blocks may grow. Four over six needs 1.5 times as much.
    """
    element = spec.format.block_scale
    assert element is not None, f"{spec.quant_type} has one level of scales"
    is_too_large = spec.four_over_six and FOUR * _E4M3.max_value > element.max_value
    return 256.0 if is_too_large else _E4M3.max_value


def stored_like(x: Tensor, spec: QuantSpec) -> Stored:
    """Return uninitialized tensors like the stored scales of `x` [..., size] from `scales_of`."""
    kind = spec.format.scale
    byte, number = (partial(x.new_empty, dtype=dtype) for dtype in (torch.uint8, torch.float32))
    if not spec.block:
        is_tensor = kind == "tensor"
        block = byte(1) if spec.tensor_scale and not is_tensor else number(0)
        return Stored(block, number(int(is_tensor)))
    blocks = (*x.shape[:-1], -(-x.shape[-1] // spec.block))
    block = number(blocks) if kind == "fp32" else byte((*blocks, 4) if kind == "hif4" else blocks)
    return Stored(block, number(int(kind == "two-level")))


def tensor_factors(amax: float, spec: QuantSpec) -> tuple[float, float]:
    """Return the factors of a tensor with this amax before and after rounding.

    The first one maps elements into the range of their format, or, with `two-level` scales, the
    amax of blocks to their scales. If amax is not finite, the second one is NaN.
    """
    if spec.format.scale == "none":  # a power of two, as in `_none`
        power = 0
        if 0 < amax < math.inf:
            power = math.frexp(amax)[1] - 1 - spec.format.tapered.widths[0][0]
        power = max(power, SCALE_EXPONENT_MIN)
        return 2.0**-power, 2.0**power
    if not math.isfinite(amax):
        return 1.0, math.nan
    top = spec.format.minifloat.max_value
    two_level = spec.format.scale == "two-level"
    total = top * largest_scale(spec) if two_level else top
    up = min(_float32(total / amax), _LARGEST) if amax else 1.0
    down = _float32(1 / up)
    return (_float32(up * _float32(1 / top)) if two_level else up), down


def alpha_of(amax: float, spec: QuantSpec) -> float:
    """Return the scale of a tensor, a float32, that quantized values `without_alpha` lack.

    It is 1 if amax is not finite: all values are then NaN.
    """
    if not spec.scales_by_tensor:
        return 1.0
    alpha = tensor_factors(amax, spec)[1]
    return 1.0 if math.isnan(alpha) else alpha


def decode_factors(stored: Stored, spec: QuantSpec) -> Tensor:
    """Return `Scales.decode` for stored scales."""
    if spec.without_alpha:
        return _without_alpha(stored, spec)
    kind, block = spec.format.scale, stored.block
    if kind == "none" and not block.numel():
        return torch.ones(1, dtype=torch.float64, device=block.device)
    if kind in ("none", "e8m0", "power-of-two"):
        exponents = block.long() - SCALE_BIAS
        return torch.where(exponents == SCALE_EXPONENT_NAN, torch.nan, power_of_two(exponents))
    if kind == "tensor":
        return stored.tensor.double()
    if kind == "fp32":
        return block.double()
    if kind in ("one-level", "two-level"):
        return _levels_decode(stored, spec)
    return _hif4_decode(block)


def _without_alpha(stored: Stored, spec: QuantSpec) -> Tensor:
    """Return the factors without the scale of the tensor; NaN if that is NaN."""
    if spec.format.scale == "none":
        return torch.ones(1, dtype=torch.float64, device=stored.block.device)
    element = spec.format.block_scale
    blocks = _from_code(stored.block, element) if element else 1.0
    return torch.where(stored.tensor.isnan(), torch.nan, blocks)


def _levels_decode(stored: Stored, spec: QuantSpec) -> Tensor:
    element = spec.format.block_scale
    assert element is not None
    blocks = _from_code(stored.block, element)
    if stored.tensor.numel():
        return fp32(blocks * stored.tensor.double())
    return torch.where(stored.block == 255, torch.nan, blocks)


def blocks_of(x: Tensor, block: int) -> Tensor:
    """Reshape `x` [..., size] to [..., blocks, block]; the last block is padded with zeros."""
    # Zeros change neither a block's amax nor whether it is finite.
    missing = -x.shape[-1] % block
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x  # `pad` copies
    blocks: Tensor = padded.unflatten(-1, (padded.shape[-1] // block, block))
    return blocks


def expand_scales(factors: Tensor, run: int | None, size: int) -> Tensor:
    """Repeat each run's factor [..., runs] for each of its elements [..., size]."""
    if run is None:
        return factors.reshape(()) if factors.numel() == 1 else factors
    return factors.repeat_interleave(run, dim=-1)[..., :size]


def exponent(x: Tensor) -> Tensor:
    """Read floor(log2 |x|) from the bits of float64 `x`: -1023 for zero, 1024 for Inf and NaN.

    Every finite float32, subnormals included, is a normal float64, so its field is the exponent.
    """
    return ((x.view(torch.int64) >> 52) & 0x7FF) - 1023


def power_of_two(exponent: Tensor) -> Tensor:
    """Build 2^exponent as float64 from its bits, for -1022 <= exponent <= 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)


def fp32(x: Tensor) -> Tensor:
    """Round float64 to the values of float32."""
    return x.float().double()


def bf16(x: Tensor) -> Tensor:
    """Round float64 to float32, and that to the values of bfloat16."""
    return x.float().bfloat16().double()


def pattern(value: float) -> int:
    """Return the bits of a float32, as a signed integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _float32(x: float) -> float:
    """Round to a float32; a value beyond its range becomes infinite."""
    return ctypes.c_float(x).value


def round_even(x: Tensor, element: Minifloat) -> Tensor:
    """Round float64 to the nearest value of an element, ties to even."""
    x = x.clamp(-element.max_value, element.max_value)
    quantum = power_of_two(exponent(x).clamp(min=element.emin) - element.mantissa_bits)
    return torch.round(x / quantum) * quantum


# -- each kind: the stored scales, and the factors to encode with ----------------------------------


def _none(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> tuple[Stored, Tensor]:
    """With `tensor_scale`, map amax to the exponent of a tapered element's widest mantissas.

    The scale is 1 for an empty tensor, and if amax is zero, infinite or NaN.
    """
    none = _NONE.to(x.device)
    if not spec.tensor_scale:
        return Stored(none, none), torch.ones(1, dtype=torch.float64, device=x.device)
    largest = _tensor_amax(x, amax)
    power = (exponent(largest) - spec.format.tapered.widths[0][0]).clamp(min=SCALE_EXPONENT_MIN)
    power = torch.where(largest.isfinite() & (largest > 0), power, 0).reshape(1)
    return Stored((power + SCALE_BIAS).to(torch.uint8), none), power_of_two(-power)


def _e8m0(x: Tensor, spec: QuantSpec, _: Tensor | None) -> tuple[Stored, Tensor]:
    amax = _block_amax(x, spec)
    power = _mx_exponent(amax, spec.format.minifloat, spec.scale_rule)
    power = torch.where(amax.isfinite(), power, SCALE_EXPONENT_NAN)
    encode = torch.where(amax.isfinite(), power_of_two(-power), torch.nan)
    return Stored((power + SCALE_BIAS).to(torch.uint8), _NONE.to(x.device)), encode


def _mx_exponent(amax: Tensor, element: Minifloat, scale_rule: str) -> Tensor:
    """Return the exponents of the E8M0 scales of blocks with these amax."""
    power = exponent(amax)
    significand = amax / power_of_two(power)
    if scale_rule == "rceil":  # ceil(log2(amax / max_value)); the exponent of max_value is emax
        power = power + (significand > element.max_value / 2.0**element.emax)
    elif scale_rule == "ceil":  # ceil(log2(amax))
        power = power + (significand > 1.0)
    elif scale_rule == "even":  # does amax, rounded half up to an element's mantissa, carry?
        power = power + (significand >= 2.0 - 2.0 ** -(element.mantissa_bits + 1))
    return (power - element.emax).clamp(SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX)


def _power_of_two(x: Tensor, spec: QuantSpec, _: Tensor | None) -> tuple[Stored, Tensor]:
    scale = _to_top(_block_amax(x, spec), spec.format.minifloat)
    power = torch.where(scale.isnan(), SCALE_EXPONENT_NAN, -exponent(scale))
    encode = torch.where(scale.isnan(), torch.nan, power_of_two(-power))
    return Stored((power + SCALE_BIAS).to(torch.uint8), _NONE.to(x.device)), encode


def _fp32(x: Tensor, spec: QuantSpec, _: Tensor | None) -> tuple[Stored, Tensor]:
    scale = _to_top(_block_amax(x, spec), spec.format.minifloat)
    return Stored((1 / scale).float(), _NONE.to(x.device)), scale


def _tensor(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> tuple[Stored, Tensor]:
    scale = _to_top(_tensor_amax(x, amax), spec.format.minifloat).reshape(1)
    return Stored(_NONE.to(x.device), (1 / scale).float()), scale


def _to_top(amax: Tensor, element: Minifloat) -> Tensor:
    """Return the factor that maps `amax` to the element's largest value; NaN if not finite."""
    scale = fp32(element.max_value / amax).clamp(max=_LARGEST)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def _one_level(x: Tensor, spec: QuantSpec, _: Tensor | None) -> tuple[Stored, Tensor]:
    """Scale blocks as with two levels and a tensor whose scale is 1."""
    unit = torch.ones(1, dtype=torch.float64, device=x.device)
    codes, encode = _levels(x, spec, unit, unit)
    is_finite = _block_amax(x, spec).isfinite()
    codes = torch.where(is_finite, codes, 255)
    encode = torch.where(is_finite, encode, torch.nan)
    return Stored(codes.to(torch.uint8), _NONE.to(x.device)), encode


def _two_level(x: Tensor, spec: QuantSpec, amax: Tensor | None) -> tuple[Stored, Tensor]:
    """Scale the tensor so that its block scales fit their element, and its elements theirs."""
    largest, top = _tensor_amax(x, amax), largest_scale(spec) * spec.format.minifloat.max_value
    total = fp32(top / largest).clamp(max=_LARGEST)
    total = torch.where((largest == 0) | ~largest.isfinite(), 1.0, total)
    inverse = torch.where(largest.isfinite(), fp32(1 / total), torch.nan)
    codes, encode = _levels(x, spec, total, inverse)
    return Stored(codes.to(torch.uint8), inverse.float().reshape(1)), encode


def _levels(x: Tensor, spec: QuantSpec, total: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the blocks' scales, and the factors to encode with."""
    top, element = spec.format.minifloat.max_value, spec.format.block_scale
    assert element is not None
    # One factor for both, as in the published code: it rounds once.
    share = fp32(total * fp32(torch.full_like(total, 1 / top)))
    exact = fp32(_block_amax(x, spec).nan_to_num() * share)
    block = round_even(exact, element)
    if spec.four_over_six:
        four = round_even(fp32(FOUR * exact), element)
        is_smaller = _error(x, spec, four, inverse) < _error(x, spec, block, inverse)
        # Elements over a scale of 0 have no error in its units.
        block = torch.where(is_smaller | (block == 0), four, block)
    return _to_code(block, element), _up(block, inverse)


def _up(block: Tensor, inverse: Tensor) -> Tensor:
    return fp32(1 / fp32(block * inverse)).clamp(max=_LARGEST)


def _error(x: Tensor, spec: QuantSpec, block: Tensor, inverse: Tensor) -> Tensor:
    """Return the error of each block [..., blocks] with these scales, of squares in each row.

    An element's error is |q - y| or its square, in whole numbers of 2^-19, where y = |x| times the
    encode factor, and q is y rounded to nearest even whatever the rounding of elements, so that the
    choice depends only on x. The sum is exact, so no order of the elements changes it; the result
    is the sum times the block's scale, or times its square.
    """
    power = 2 if spec.four_over_six == "mse" else 1
    up = _up(block, inverse).unsqueeze(-1)
    steps = fp32(blocks_of(x, spec.block_size).abs().double() * up)
    off = (steps - round_even(steps, spec.format.minifloat)).abs()
    units = torch.round(fp32(off**power) * 2.0**ERROR_BITS).sum(dim=-1)
    return fp32(fp32(_of_tiles(units, spec, torch.sum)) * block**power)


def _hif4(x: Tensor, spec: QuantSpec, _: Tensor | None) -> tuple[Stored, Tensor]:
    """Use an E6M2 for 64 elements, a power of two for each 8 of them, and another for each 4.

    s0 = E6M2(bf16(amax * bf16(1/7))), to nearest even, and r = bf16(1 / s0). s1 = 2 if fl(amax of
    the 8 * r) >= 4, else 1; s2 = 2 if fl(amax of the 4 * r) / s1 >= 2, else 1. An element is
    bf16(fl(x * r / s1 / s2)), as in Huawei's later reference, and unlike the first public code.
    """
    blocks = blocks_of(x, spec.block_size).abs().double()
    amax = blocks.amax(dim=-1)
    seventh = bf16(torch.full_like(amax, 1 / 7))
    scale = bf16(amax.nan_to_num(posinf=1.0) * seventh).clamp(2.0**-48, E6M2.max_value)
    scale = round_even(scale, E6M2)
    inverse = bf16(1 / scale).unsqueeze(-1)
    eights = fp32(blocks.unflatten(-1, (8, 8)).amax(dim=-1) * inverse) >= 4
    half = torch.where(eights, 0.5, 1.0).repeat_interleave(2, dim=-1)
    fours = fp32(blocks.unflatten(-1, (16, 4)).amax(dim=-1) * inverse) * half >= 2
    code = torch.where(amax.isfinite(), _to_code(scale, E6M2) - 4, 255)  # no subnormals: 4 less
    encode = inverse * half * torch.where(fours, 0.5, 1.0)
    encode = torch.where(amax.isfinite().unsqueeze(-1), encode, torch.nan).flatten(-2)
    bits = torch.cat((eights, fours), dim=-1).unflatten(-1, (3, 8)).long()
    bits = (bits << torch.arange(8, device=x.device)).sum(dim=-1)
    stored = torch.cat((code.unsqueeze(-1).long(), bits), dim=-1).to(torch.uint8)
    return Stored(stored, _NONE.to(x.device)), encode[..., : -(-x.shape[-1] // _HIF4_RUN)]


def _hif4_decode(stored: Tensor) -> Tensor:
    code = stored[..., :1].long()
    scale = torch.where(code == 255, torch.nan, _from_code(code + 4, E6M2))
    bits = stored[..., 1:].long().unsqueeze(-1) >> torch.arange(8, device=stored.device) & 1
    powers = torch.where(bits.flatten(-2) == 1, 2.0, 1.0).double()
    return (scale * powers[..., :8].repeat_interleave(2, dim=-1) * powers[..., 8:]).flatten(-2)


_Find = Callable[[Tensor, QuantSpec, Tensor | None], tuple[Stored, Tensor]]
_FIND: dict[str, _Find] = {
    "none": _none,
    "e8m0": _e8m0,
    "power-of-two": _power_of_two,
    "fp32": _fp32,
    "tensor": _tensor,
    "one-level": _one_level,
    "two-level": _two_level,
    "hif4": _hif4,
}


# -- largest magnitudes, and codes of scales -------------------------------------------------------


def _tensor_amax(x: Tensor, given: Tensor | None) -> Tensor:
    return (largest(x) if given is None else given).double()


def _block_amax(x: Tensor, spec: QuantSpec) -> Tensor:
    """Return the largest magnitude in each block [..., blocks], of squares in each row."""
    magnitudes = blocks_of(x, spec.block_size).abs()
    # In the order of memory, a reduction along a strided axis takes a twentieth of the time.
    order = memory_order(magnitudes)
    amax = magnitudes.permute(order).amax(dim=order.index(x.dim()), keepdim=True)
    amax = permute_back(amax, order).squeeze(-1).double().contiguous()
    return _of_tiles(amax, spec, torch.amax)


def _of_tiles(blocks: Tensor, spec: QuantSpec, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce the numbers of blocks in a row [..., blocks] to that of their square, if any."""
    if spec.tile == "row" or not blocks.numel():
        return blocks
    rows = blocks.reshape(-1, blocks.shape[-1]).T
    squares = reduce(blocks_of(rows, spec.block_size), dim=-1)
    return expand_scales(squares, spec.block, rows.shape[-1]).T.reshape(blocks.shape)


def _to_code(values: Tensor, element: Minifloat) -> Tensor:
    """Return the codes, int64, of positive values of an element."""
    field = exponent(values).clamp(min=element.emin)
    steps = (values / power_of_two(field - element.mantissa_bits)).long()
    # The leading bit of a normal value's steps adds the 1 that is missing in its field.
    return ((field - element.emin) << element.mantissa_bits) + steps


def _from_code(codes: Tensor, element: Minifloat) -> Tensor:
    unit = 1 << element.mantissa_bits
    field, mantissa = codes.long() // unit, codes.long() % unit
    steps = mantissa + torch.where(field > 0, unit, 0)
    return steps * power_of_two(field.clamp(min=1) - 1 + element.min_exponent)
