"""The compile-time parameters of the kernels for a spec."""

import functools
from dataclasses import dataclass

from mqo.quant.formats import Minifloat, TaperedFormat
from mqo.quant.scales import E6M2, ERROR_BITS, FOUR, carry_of, largest_scale, pattern, run_of
from mqo.quant.spec import QuantSpec


@dataclass(frozen=True)
class Element:
    """The values of an element.

    bits: of the mantissa. A tapered element has `widths` instead: two bits for 2^e, at bit
        |e| & 28; otherwise it is 0.
    smallest: the pattern of the power of two below which the step size is constant.
    top: larger values are clamped to it; a tapered element ends at `limit`, but rounds beyond it.
    infinite: whether values beyond the limit become Infinity.
    signed_zero: whether a zero keeps its sign.
    """

    bits: int
    widths: int
    smallest: int
    top: float
    limit: float
    infinite: bool
    signed_zero: bool

    @classmethod
    def from_row(cls, element: Minifloat | TaperedFormat, overflow: str = "saturate") -> "Element":
        """Derive the values from a row of formats.toml."""
        if isinstance(element, Minifloat):
            top, smallest = element.max_value, pattern(2.0**element.emin)
            return cls(element.mantissa_bits, 0, smallest, top, top, False, not element.complement)
        widths = 0
        for exponent in range(0, 32, 4):
            width = next((bits for largest, bits in element.widths if exponent <= largest), 0)
            widths |= width << exponent
        smallest, limit = pattern(2.0**element.min_exponent), element.max_value
        return cls(0, widths, smallest, 2 * limit, limit, overflow == "inf", False)


# Scales that depend on the amax of the tensor.
OF_THE_TENSOR = ("tensor", "tensor-power", "two-level")


@dataclass(frozen=True)
class Steps:
    """The compile-time parameters of the steps for a spec.

    scale: a kind of formats.toml, except that "power-of-two" is "e8m0" with the rule "rceil", and
        "none" with a power of two for the tensor is "tensor-power".
    emax: amax is mapped to this exponent, the largest of the element, or the largest with the
        widest mantissa.
    carry: added to the pattern of amax, it carries into the exponent if the scale rule rounds up.
    run, side: the number of elements in a row, and of rows, that share their scales.
    alpha: whether results include the scale of the tensor.
    exact: whether results for bfloat16 are exact in bfloat16.
    scale_element: the element to which the scale of a block is rounded; None for powers of two.
    top: two-level: the amax of the tensor is mapped to it.
    error: "mse" or "mae" if the error of a block chooses its scale, else "".
    four: the scale that maps an amax to 4, in units of the one that maps it to 6.
    anchor: the last bit of a float32 sum with it is the unit of errors.
    """

    element: Element
    rounding: str
    scale: str
    emax: int
    carry: int
    run: int
    side: int
    alpha: bool
    exact: bool
    scale_element: Element | None
    top: float
    error: str
    four: float = FOUR
    anchor: float = 2.0 ** (23 - ERROR_BITS)


@functools.cache
def steps_of(spec: QuantSpec) -> Steps:
    """Return the steps of a spec."""
    element, scale = spec.format.element, spec.format.scale
    if scale == "none" and spec.tensor_scale:
        scale = "tensor-power"
    if scale == "power-of-two":
        scale = "e8m0"
    scale_element = E6M2 if scale == "hif4" else spec.format.block_scale
    two_level = scale == "two-level"
    return Steps(
        element=Element.from_row(element, spec.overflow),
        rounding=spec.rounding_mode,
        scale=scale,
        emax=element.widths[0][0] if isinstance(element, TaperedFormat) else element.emax,
        carry=carry_of(spec) if scale == "e8m0" else 0,
        run=run_of(spec) or 32,
        side=spec.block_size if spec.tile == "square" else 1,
        alpha=not spec.without_alpha,
        exact=scale in ("none", "tensor-power", "e8m0", "one-level", "hif4"),
        scale_element=Element.from_row(scale_element) if scale_element else None,
        top=largest_scale(spec) * spec.format.minifloat.max_value if two_level else 0.0,
        error=spec.four_over_six or "",
    )
