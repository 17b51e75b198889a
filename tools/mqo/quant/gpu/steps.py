"""What the kernels need to know of a spec when they are compiled."""

import functools
import struct
from dataclasses import dataclass

from mqo.quant.formats import ELEMENTS, Minifloat, TaperedFormat
from mqo.quant.scales import E6M2, carry_of, run_of
from mqo.quant.spec import QuantSpec


def _pattern(value: float) -> int:
    """Return the bits of a float32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@dataclass(frozen=True)
class Element:
    """The values to round to.

    bits: of the mantissa. For a tapered element `widths` holds them instead: at bit |e| & 28, two
        bits for 2^e; else it is 0.
    smallest: the pattern of the power of two below which the steps stay as they are.
    top: what is larger is taken for this; a tapered element ends at `limit`, but rounds beyond it.
    infinite: whether what is beyond the limit becomes Infinity.
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
    def of(cls, element: Minifloat | TaperedFormat, overflow: str = "saturate") -> "Element":
        """Take over a row of formats.toml."""
        if isinstance(element, Minifloat):
            top, smallest = element.max_value, _pattern(2.0**element.emin)
            return cls(element.mantissa_bits, 0, smallest, top, top, False, not element.complement)
        widths = 0
        for exponent in range(0, 32, 4):
            width = next((bits for largest, bits in element.widths if exponent <= largest), 0)
            widths |= width << exponent
        smallest, limit = _pattern(2.0**element.min_exponent), 2.0**element.max_exponent
        return cls(0, widths, smallest, 2 * limit, limit, overflow == "inf", False)


# Scales that follow from the amax of the tensor.
OF_THE_TENSOR = ("tensor", "tensor-power", "two-level")
_SCALE_ELEMENTS = {"two-level": Element.of(ELEMENTS["e4m3"]), "hif4": Element.of(E6M2)}


@dataclass(frozen=True)
class Steps:
    """What the steps for a spec need to know at compile time.

    scale: a kind of formats.toml, but that "power-of-two" is "e8m0" with the rule "rceil", and that
        "none" with a power of two for the tensor is "tensor-power".
    emax: the exponent that amax is taken to: that of the element's largest value, or of the widest
        mantissas. `carry` added to the pattern of an amax makes a significand that the scale rule
        rounds up carry into the exponent.
    run: elements in a row that share their scales; `side`: rows that do.
    exact: whether results have no more bits than bfloat16.
    scale_element: what the scale of a block is rounded to, where that is more than a power of two.
    """

    element: Element
    rounding: str
    scale: str
    emax: int
    carry: int
    run: int
    side: int
    exact: bool
    scale_element: Element | None


@functools.cache
def steps_of(spec: QuantSpec) -> Steps:
    """Return the steps of a spec."""
    element, scale = spec.format.element, spec.format.scale
    if scale == "none" and spec.tensor_scale:
        scale = "tensor-power"
    if scale == "power-of-two":
        scale = "e8m0"
    return Steps(
        element=Element.of(element, spec.overflow),
        rounding=spec.rounding_mode,
        scale=scale,
        emax=element.widths[0][0] if isinstance(element, TaperedFormat) else element.emax,
        carry=carry_of(spec) if scale == "e8m0" else 0,
        run=run_of(spec) or 32,
        side=spec.block_size if spec.tile == "square" else 1,
        exact=scale in ("none", "tensor-power", "e8m0", "hif4"),
        scale_element=_SCALE_ELEMENTS.get(scale),
    )
