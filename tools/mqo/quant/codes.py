"""The value of each code of a format."""

import math

from mqo.quant.formats import FORMATS, Minifloat, TaperedFormat, check_choice

# HiFloat8's codes without the sign: (first code, exponent bits, all bits that follow the prefix).
_HIF8_RANGES = ((0x60, 4, 5), (0x40, 3, 5), (0x20, 2, 5), (0x10, 1, 4), (0x08, 0, 3))


def code_values(quant_type: str) -> list[float]:
    """Return the value of every code of a format, without a scale: 16, 64 or 256 values.

    Infinities and NaN are included.

    Examples:
        >>> code_values("mxfp4")[:8]
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    check_choice("coded type", quant_type, tuple(FORMATS))
    element = FORMATS[quant_type].element
    if isinstance(element, TaperedFormat):
        check_choice("tapered element with codes", element.name, ("hif8",))
        positive = [_hif8_value(element, code) for code in range(128)]
        return [*positive, math.nan, *(-value for value in positive[1:])]
    half = 2 ** (element.bits - 1)
    if element.complement:
        steps = [*range(half), *range(-half, 0)]
        return [math.ldexp(step, -element.mantissa_bits) for step in steps]
    positive = [_minifloat_value(element, code) for code in range(half)]
    return [*positive, *(-value for value in positive)]


def _minifloat_value(element: Minifloat, code: int) -> float:
    if element.emin == element.emax:  # one step everywhere
        return math.ldexp(code, element.min_exponent)
    exponent, mantissa = divmod(code, 2**element.mantissa_bits)
    significand = mantissa + (2**element.mantissa_bits if exponent else 0)
    value = math.ldexp(significand, element.min_exponent + max(exponent, 1) - 1)
    if value <= element.max_value:
        return value
    return math.inf if element.has_infinity and mantissa == 0 else math.nan


def _hif8_value(element: TaperedFormat, code: int) -> float:
    if code < 8:
        return 2.0 ** (code - 23) if code else 0.0
    first, exponent_bits, bits = next(row for row in _HIF8_RANGES if code >= row[0])
    mantissa_bits = bits - exponent_bits
    field, mantissa = divmod(code - first, 2**mantissa_bits)
    exponent = 0
    if exponent_bits:  # a sign, and the bits below a leading 1
        negative, low = divmod(field, 2 ** (exponent_bits - 1))
        exponent = (2 ** (exponent_bits - 1) + low) * (-1 if negative else 1)
    if exponent == element.max_exponent and mantissa:
        return math.inf
    return math.ldexp(2**mantissa_bits + mantissa, exponent - mantissa_bits)
