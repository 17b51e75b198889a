"""The reference quantizers: plain PyTorch, slow and exact, that every faster one must equal.

Quantizing is two steps, which packed storage takes one at a time: `encode` finds the scales and
rounds to the format's values, `decode` multiplies them again. The arithmetic is float64, where
every step is exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .formats import (
    SCALE_EXPONENT_MAX,
    SCALE_EXPONENT_MIN,
    SCALE_EXPONENT_NAN,
    MxElement,
    TaperedFormat,
)
from .spec import QuantSpec
from .stochastic import RANDOM_BITS, draws


class Encoded(NamedTuple):
    """A quantized tensor, taken apart; `axis` is its last here.

    values: float64, of the format's own values [..., size]; 0 where the scale is NaN.
    exponents: int64, of the power-of-two scales [..., blocks], SCALE_EXPONENT_NAN for NaN; [1] for
        a tensor scale, [0] without any scale.
    """

    values: Tensor
    exponents: Tensor


def qdq(
    x: Tensor, spec: QuantSpec, axis: int = -1, out: Tensor | None = None, seed: int | None = None
) -> Tensor:
    """What `backend.fake_quantize` returns, which checks the arguments; supports them all."""
    encoded = encode(x, spec, axis, seed)
    result = torch.empty_like(x) if out is None else out
    decoded = decode(encoded, spec)
    return result.copy_(decoded.movedim(-1, _axis(spec, axis)) if x.dim() else decoded)


def encode(x: Tensor, spec: QuantSpec, axis: int, seed: int | None) -> Encoded:
    """Round `x` to the values and scales of `spec`."""
    axis = _axis(spec, axis)
    random = None
    if spec.rounding == "stochastic":
        random = draws(x.shape, seed, x.device).movedim(axis, -1)
    x = x.movedim(axis, -1) if x.dim() else x
    encode_as = _encode_tapered if spec.block is None else _encode_mx
    return encode_as(x, spec.format.element, spec, random)


def scale_exponents(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """Return the `Encoded.exponents` of `x`, without rounding anything."""
    x = x.movedim(_axis(spec, axis), -1)
    if spec.block is not None:
        return _block_exponents(x, spec.format.element, spec)
    if spec.tensor_scale:
        return _tensor_exponent(x, spec.format.element).reshape(1)
    return torch.empty(0, dtype=torch.int64, device=x.device)


def decode(encoded: Encoded, spec: QuantSpec) -> Tensor:
    """Return values times scales in float64, [..., size]."""
    values, exponents = encoded
    scale = _power_of_two(exponents)
    if spec.block is None:
        return values * scale[0] if spec.tensor_scale else values
    scale = torch.where(exponents == SCALE_EXPONENT_NAN, torch.nan, scale)
    return values * _spread(scale, values, spec.block)


def _axis(spec: QuantSpec, axis: int) -> int:
    return -1 if spec.block is None else axis


def _encode_mx(x: Tensor, element: MxElement, spec: QuantSpec, random: Tensor | None) -> Encoded:
    exponents = _block_exponents(x, element, spec)
    scaled = x.double() / _spread(_power_of_two(exponents), x, spec.block)
    values = _round_element(scaled, element, spec.rounding, random)
    lost = _spread(exponents == SCALE_EXPONENT_NAN, x, spec.block)
    return Encoded(torch.where(lost, 0.0, values), exponents)


def _block_exponents(x: Tensor, element: MxElement, spec: QuantSpec) -> Tensor:
    """Return the exponent of each block's scale [..., blocks]; SCALE_EXPONENT_NAN: not finite."""
    amax = blocks_of(x, spec.block).abs().amax(dim=-1).double()
    exponents = _scale_exponent(amax, element, spec.scale_rule)
    return torch.where(amax.isfinite(), exponents, SCALE_EXPONENT_NAN)


def blocks_of(x: Tensor, block: int) -> Tensor:
    """Return `x` [..., size] as [..., blocks, block], the last one filled up with zeros."""
    # Zeros change neither a block's amax nor whether it is finite.
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % block))
    return padded.unflatten(-1, (padded.shape[-1] // block, block))


def _spread(per_block: Tensor, x: Tensor, block: int) -> Tensor:
    """Repeat what each block has [..., blocks] for each of its elements [..., size]."""
    return per_block.repeat_interleave(block, dim=-1)[..., : x.shape[-1]]


def _scale_exponent(amax: Tensor, element: MxElement, scale_rule: str) -> Tensor:
    """Return the exponent of the E8M0 scale of blocks whose largest magnitude is `amax`."""
    exponent = _exponent(amax)
    significand = amax / _power_of_two(exponent)
    if scale_rule == "rceil":  # ceil(log2(amax / max_value)); the exponent of max_value is emax
        exponent = exponent + (significand > element.max_value / 2.0**element.emax)
    elif scale_rule == "ceil":  # ceil(log2(amax))
        exponent = exponent + (significand > 1.0)
    elif scale_rule == "even":  # does amax, rounded half up to an element's mantissa, carry?
        exponent = exponent + (significand >= 2.0 - 2.0 ** -(element.mantissa_bits + 1))
    return (exponent - element.emax).clamp(SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX)


def _round_element(x: Tensor, element: MxElement, rounding: str, random: Tensor | None) -> Tensor:
    """Round float64 `x` to the values of `element`, and saturate; a zero keeps its sign."""
    quantum = _power_of_two(_exponent(x).clamp(min=element.emin) - element.mantissa_bits)
    rounded = _round_steps(x.abs() / quantum, rounding, random) * quantum
    return rounded.clamp(max=element.max_value).copysign(x)


def _encode_tapered(
    x: Tensor, fmt: TaperedFormat, spec: QuantSpec, random: Tensor | None
) -> Encoded:
    if not spec.tensor_scale:
        values = _round_tapered(x.double(), fmt, spec, random)
        return Encoded(values, torch.empty(0, dtype=torch.int64, device=x.device))
    exponent = _tensor_exponent(x, fmt)
    values = _round_tapered(x.double() / _power_of_two(exponent), fmt, spec, random)
    return Encoded(values, exponent.reshape(1))


def _tensor_exponent(x: Tensor, fmt: TaperedFormat) -> Tensor:
    """Return the tensor scale's exponent: it takes amax to the top of the widest mantissas.

    0 for an empty tensor, and where amax is zero, infinite or NaN.
    """
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    exponent = _exponent(amax.double()) - fmt.widths[0][0]
    exponent = exponent.clamp(SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX)
    return torch.where(amax.isfinite() & (amax > 0), exponent, 0)


def _round_tapered(x: Tensor, fmt: TaperedFormat, spec: QuantSpec, random: Tensor | None) -> Tensor:
    """Round float64 `x` to the values of `fmt`; zero has no sign.

    Below 2^min_exponent the grid is {0, 2^min_exponent}; above 2^max_exponent it goes on as if
    there were no end, and whatever rounds to there overflows.
    """
    magnitude = x.abs()
    exponent = _exponent(magnitude).clamp(fmt.min_exponent, fmt.max_exponent)
    bits = torch.zeros_like(exponent)
    for largest, width in reversed(fmt.widths):
        bits = torch.where(exponent.abs() <= largest, width, bits)
    quantum = _power_of_two(exponent - bits)
    # Ties to even go by the code's last bit, which alternates along the grid. Where there is no
    # mantissa, steps 1 and 2 stand for the codes of 2^e and 2^(e+1), of which 2^e has the even one
    # where e is odd: a step more, and steps are as even as codes.
    lift = (exponent & 1) * (bits == 0) if spec.rounding == "nearest-even" else 0
    rounded = (_round_steps(magnitude / quantum + lift, spec.rounding, random) - lift) * quantum
    largest = 2.0**fmt.max_exponent
    limit = largest if spec.overflow == "saturate" else torch.inf
    rounded = torch.where(rounded > largest, limit, rounded)
    return torch.where(rounded == 0, 0.0, rounded.copysign(x))


def _round_steps(steps: Tensor, rounding: str, random: Tensor | None) -> Tensor:
    """Round a float64 count of quanta, which is not negative, to a whole one."""
    if rounding == "nearest-even":
        return torch.round(steps)
    if rounding == "nearest-away":
        return torch.floor(steps + 0.5)
    lower = torch.floor(steps)
    share = torch.floor((steps - lower) * 2.0**RANDOM_BITS)
    return lower + (random < share)


def _exponent(x: Tensor) -> Tensor:
    """Read floor(log2 |x|) from the bits of float64 `x`: -1023 for zero, 1024 for Inf and NaN.

    Every finite float32, subnormals included, is a normal float64, so the field is the exponent.
    """
    return ((x.view(torch.int64) >> 52) & 0x7FF) - 1023


def _power_of_two(exponent: Tensor) -> Tensor:
    """Build 2^exponent as float64, by its bits, for -1022 <= exponent <= 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)
