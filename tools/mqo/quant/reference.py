"""The reference quantizers: slow, exact PyTorch code, which all faster ones must equal bit for bit.

Quantization has two steps, which packed storage uses separately: `encode` computes the scales and
rounds to the format's values, `decode` multiplies them. The arithmetic is float64: every operation
is exact, except those that are deliberately rounded to float32 (scales.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mqo.quant.formats import Minifloat, TaperedFormat
from mqo.quant.scales import Scales, bf16, expand_scales, exponent, fp32, power_of_two, scales_of
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import RANDOM_BITS, draws


class Encoded(NamedTuple):
    """A quantized tensor as values and scales; `axis` is moved last.

    values: float64 [..., size], values of the format; 0 if the scale is NaN.
    """

    values: Tensor
    scales: Scales


def qdq(
    x: Tensor,
    spec: QuantSpec,
    axis: int = -1,
    out: Tensor | None = None,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """Quantize as `backend.fake_quantize`, which checks the arguments; all are supported."""
    encoded = encode(x, spec, axis, seed, amax)
    result = torch.empty_like(x) if out is None else out
    decoded = decode(encoded)
    return result.copy_(decoded.movedim(-1, _axis(spec, axis)) if x.dim() else decoded)


def encode(
    x: Tensor, spec: QuantSpec, axis: int, seed: int | None, amax: Tensor | None = None
) -> Encoded:
    """Round `x` to the values and scales of `spec`."""
    axis = _axis(spec, axis)
    random = None
    if spec.rounding == "stochastic":
        assert seed is not None  # `backend.fake_quantize` checks it
        random = draws(x.shape, seed, x.device).movedim(axis, -1)
    x = x.movedim(axis, -1) if x.dim() else x
    scales = scales_of(x, spec, amax)
    scaled = _times(x.double(), scales.encode, scales.run)
    if spec.format.scale == "hif4":
        scaled = bf16(scaled)
    element = spec.format.element
    if isinstance(element, TaperedFormat):
        return Encoded(_round_tapered(scaled, element, spec, random), scales)
    values = _round_element(scaled, element, spec.rounding_mode, random)
    return Encoded(values.nan_to_num(nan=0.0), scales)


def decode(encoded: Encoded) -> Tensor:
    """Return values times scales, [..., size]: float32 values in float64."""
    return _times(encoded.values, encoded.scales.decode, encoded.scales.run)


def _times(x: Tensor, factors: Tensor, run: int | None) -> Tensor:
    """Multiply each run of `x` by its factor, in float32."""
    size = x.shape[-1] if x.dim() else 1
    return fp32(x * expand_scales(factors, run, size)).reshape(x.shape)


def _axis(spec: QuantSpec, axis: int) -> int:
    return -1 if spec.block is None else axis


def _round_element(x: Tensor, element: Minifloat, rounding: str, random: Tensor | None) -> Tensor:
    """Round float64 `x` to the values of `element`, and saturate; a zero keeps its sign."""
    magnitude = x.abs().clamp(max=element.max_value)
    quantum = power_of_two(exponent(magnitude).clamp(min=element.emin) - element.mantissa_bits)
    rounded = _round_steps(magnitude / quantum, rounding, random) * quantum
    signed = rounded.clamp(max=element.max_value).copysign(x)
    return torch.where(signed == 0, 0.0, signed) if element.complement else signed


def _round_tapered(x: Tensor, fmt: TaperedFormat, spec: QuantSpec, random: Tensor | None) -> Tensor:
    """Round float64 `x` to the values of `fmt`; zero has no sign.

    Below 2^min_exponent the grid is {0, 2^min_exponent}. Above 2^max_exponent the grid continues;
    values that round to those points overflow.
    """
    magnitude = x.abs()
    power = exponent(magnitude).clamp(fmt.min_exponent, fmt.max_exponent)
    bits = torch.zeros_like(power)
    for largest, width in reversed(fmt.widths):
        bits = torch.where(power.abs() <= largest, width, bits)
    quantum = power_of_two(power - bits)
    # Ties to even depend on the last bit of the code, which alternates along the grid. Without
    # mantissa bits, steps 1 and 2 are the codes of 2^e and 2^(e+1), and the code of 2^e is even if
    # e is odd. One more step makes steps and codes equally even.
    mode = spec.rounding_mode
    lift = (power & 1) * (bits == 0) if mode == "nearest-even" else 0
    rounded = (_round_steps(magnitude / quantum + lift, mode, random) - lift) * quantum
    top = fmt.max_value
    limit = top if spec.overflow == "saturate" else torch.inf
    rounded = torch.where(rounded > top, limit, rounded)
    return torch.where(rounded == 0, 0.0, rounded.copysign(x))


def _round_steps(steps: Tensor, rounding: str, random: Tensor | None) -> Tensor:
    """Round a float64 count of quanta, not negative, to an integer."""
    if rounding == "nearest-even":
        return torch.round(steps)
    if rounding == "nearest-away":
        return torch.floor(steps + 0.5)
    assert random is not None  # drawn for stochastic rounding
    lower = torch.floor(steps)
    share = torch.floor((steps - lower) * 2.0**RANDOM_BITS)
    return lower + (random < share)
