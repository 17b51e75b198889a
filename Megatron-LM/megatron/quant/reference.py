"""The reference quantisers: plain PyTorch, slow and exact, that every faster one must equal."""

import torch
from torch import Tensor

from .formats import (
    BLOCK_SIZES,
    HIF8,
    MX_ELEMENTS,
    OVERFLOWS,
    REFERENCE_TYPES,
    SCALE_EXPONENT_MAX,
    SCALE_EXPONENT_MIN,
    SCALE_RULES,
    MxElement,
    TaperedFormat,
    check_choice,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def quantise_dequantise(
    x: Tensor,
    quant_type: str,
    *,
    axis: int = -1,
    block: int = 32,
    scale_rule: str = "floor",
    overflow: str = "saturate",
) -> Tensor:
    """Round `x` to `quant_type` and back: a new tensor of x's shape, dtype and strides.

    Formats: OCP Microscaling v1.0 for the mx types, arXiv 2409.16626 for hifp8. 'none' returns
    `x` itself. Results carry no gradient.

    Args:
        x: float32, bfloat16 or float16, of any shape and strides.
        quant_type: one of REFERENCE_TYPES.
        axis: the axis along which mx blocks run, the contraction axis of a GEMM; hifp8 has none.
        block: elements that share one mx scale, one of BLOCK_SIZES; the last block may be short.
        scale_rule: how the mx scale follows from a block's amax, one of SCALE_RULES.
        overflow: what hifp8 makes of |x| >= 40960: 'saturate' gives ±32768, 'inf' gives ±Inf.
            Mx elements always saturate.

    The arithmetic is float64, where every step is exact. The result fits x's dtype exactly, except
    where rounding up passes its largest value and gives Inf: rceil, ceil and even, within the last
    binade of a dtype. Under torch.set_flush_denormal(True) the CPU takes subnormals for zeros.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: an argument is none of the valid ones, which the text names.
    """
    check_choice("quant type", quant_type, REFERENCE_TYPES)
    check_choice("block size", block, BLOCK_SIZES)
    check_choice("scale rule", scale_rule, SCALE_RULES)
    check_choice("overflow", overflow, OVERFLOWS)
    if quant_type == "none":
        return x
    if x.dtype not in DTYPES:
        raise TypeError(f"cannot quantise {x.dtype}; valid: {', '.join(map(str, DTYPES))}")
    if quant_type == "hifp8":
        result = _round_tapered(x.double(), HIF8, overflow)
    else:
        check_choice("axis", axis, range(-x.dim(), x.dim()))
        last = x.double().movedim(axis, -1)
        result = _round_mx(last, MX_ELEMENTS[quant_type], block, scale_rule).movedim(-1, axis)
    return torch.empty_like(x).copy_(result)


def _round_mx(x: Tensor, element: MxElement, block: int, scale_rule: str) -> Tensor:
    """Quantise float64 `x` in blocks along its last axis."""
    size = x.shape[-1]
    # Zeros change neither a block's amax nor whether it is finite, so they may fill the last one.
    padded = torch.nn.functional.pad(x, (0, -size % block))
    blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // block, block)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    scale = _power_of_two(_scale_exponent(amax, element, scale_rule))
    values = _round_element(blocks / scale, element) * scale
    values = torch.where(amax.isfinite(), values, torch.nan)
    return values.reshape(padded.shape)[..., :size]


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


def _round_element(x: Tensor, element: MxElement) -> Tensor:
    """Round float64 `x` to the nearest value of `element`, ties to even, and saturate."""
    quantum = _power_of_two(_exponent(x).clamp(min=element.emin) - element.mantissa_bits)
    rounded = torch.round(x / quantum) * quantum
    return rounded.clamp(-element.max_value, element.max_value)


def _round_tapered(x: Tensor, fmt: TaperedFormat, overflow: str) -> Tensor:
    """Round float64 `x` to the nearest value of `fmt`, ties away from zero; zero has no sign."""
    magnitude = x.abs()
    # Beyond these exponents a value is zero or overflows, whatever the quantum.
    exponent = _exponent(magnitude).clamp(-32, 32)
    bits = torch.zeros_like(exponent)
    for largest, width in reversed(fmt.widths):
        bits = torch.where(exponent.abs() <= largest, width, bits)
    quantum = _power_of_two(exponent - bits)
    rounded = (torch.floor(magnitude / quantum + 0.5) * quantum).clamp(min=fmt.min_value)
    limit = fmt.max_value if overflow == "saturate" else torch.inf
    rounded = torch.where(magnitude >= fmt.overflow_from, limit, rounded)
    return torch.where(magnitude < fmt.min_value / 2, 0.0, rounded.copysign(x))


def _exponent(x: Tensor) -> Tensor:
    """Read floor(log2 |x|) from the bits of float64 `x`: -1023 for zero, 1024 for Inf and NaN.

    Every finite float32, subnormals included, is a normal float64, so the field is the exponent.
    """
    return ((x.view(torch.int64) >> 52) & 0x7FF) - 1023


def _power_of_two(exponent: Tensor) -> Tensor:
    """Build 2^exponent as float64, by its bits, for -1022 <= exponent <= 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)
