"""The number formats: one table of every type, its constants, and the choices a quantiser takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The values that a `custom_quant_type` literal in the source may hold.
QUANT_TYPES = ("none", "mxfp8", "mxfp4", "hifp8")

SCALE_RULES = ("floor", "rceil", "ceil", "even")
ROUNDINGS = ("nearest-even", "nearest-away", "stochastic")
OVERFLOWS = ("saturate", "inf")
BLOCK_SIZES = (16, 32, 64, 128)
SAVED_FORMS = ("full", "packed")


@dataclass(frozen=True)
class MxElement:
    """An element format of OCP Microscaling (MX) v1.0, section 5.3.

    A normal value is ±2^e (1 + M / 2^mantissa_bits) with emin <= e <= emax. Subnormals continue
    below 2^emin in steps of 2^(emin - mantissa_bits). A code is sign, exponent, mantissa; those
    beyond `max_value` are NaN, and the first of them Infinity where `has_infinity`.
    """

    name: str
    code_bits: int
    emax: int
    emin: int
    mantissa_bits: int
    max_value: float
    has_infinity: bool = False


E4M3 = MxElement("e4m3", code_bits=8, emax=8, emin=-6, mantissa_bits=3, max_value=448.0)
E5M2 = MxElement(
    "e5m2",
    code_bits=8,
    emax=15,
    emin=-14,
    mantissa_bits=2,
    max_value=57344.0,
    has_infinity=True,
)
E2M1 = MxElement("e2m1", code_bits=4, emax=2, emin=0, mantissa_bits=1, max_value=6.0)

MX_ELEMENTS = {"mxfp8": E4M3, "mxfp4": E2M1, "mxfp8_e5m2": E5M2}

# The quantisers also know mxfp8_e5m2, which no source literal may name yet.
REFERENCE_TYPES = (*QUANT_TYPES, "mxfp8_e5m2")

# MX v1.0 asks for ties to even; HiFloat8 trains with TA, ties away from zero.
DEFAULT_ROUNDING = dict.fromkeys(MX_ELEMENTS, "nearest-even") | {"hifp8": "nearest-away"}

# E8M0, the shared scale of an MX block: a byte b is 2^(b - 127), 2^-127 .. 2^127; 255 is NaN.
SCALE_EXPONENT_MIN = -127
SCALE_EXPONENT_MAX = 127
SCALE_BIAS = 127
SCALE_EXPONENT_NAN = 128


@dataclass(frozen=True)
class TaperedFormat:
    """A format whose mantissa narrows as the exponent grows, such as HiFloat8 (arXiv 2409.16626).

    `widths` lists (largest |exponent|, mantissa bits), widest mantissa first; below the last there
    are powers of two alone, down to 2^min_exponent. Infinity stands where the first value above
    2^max_exponent would, so that a value overflows when it rounds to that one.
    """

    name: str
    widths: tuple[tuple[int, int], ...]
    min_exponent: int
    max_exponent: int


HIF8 = TaperedFormat("hifp8", ((3, 3), (7, 2), (15, 1)), min_exponent=-22, max_exponent=15)


# HiFloat8's codes without the sign: (first code, exponent bits, all bits that follow the prefix).
_TAPERED_RANGES = ((0x60, 4, 5), (0x40, 3, 5), (0x20, 2, 5), (0x10, 1, 4), (0x08, 0, 3))


def code_values(quant_type: str) -> list[float]:
    """Return the value of every code of a format: 16 for mxfp4, 256 for the others.

    An mx element's value is without its block's scale. Infinities and NaN included.
    """
    check_choice("coded type", quant_type, REFERENCE_TYPES[1:])
    if quant_type == "hifp8":
        positive = [_tapered_value(code) for code in range(128)]
        return [*positive, math.nan, *(-value for value in positive[1:])]
    element = MX_ELEMENTS[quant_type]
    positive = [_mx_value(element, code) for code in range(2 ** (element.code_bits - 1))]
    return [*positive, *(-value for value in positive)]


def _mx_value(element: MxElement, code: int) -> float:
    exponent, mantissa = divmod(code, 2**element.mantissa_bits)
    significand = mantissa + (2**element.mantissa_bits if exponent else 0)
    value = math.ldexp(significand, element.emin - element.mantissa_bits + max(exponent, 1) - 1)
    if value <= element.max_value:
        return value
    return math.inf if element.has_infinity and mantissa == 0 else math.nan


def _tapered_value(code: int) -> float:
    if code < 8:
        return 2.0 ** (code - 23) if code else 0.0
    first, exponent_bits, bits = next(row for row in _TAPERED_RANGES if code >= row[0])
    mantissa_bits = bits - exponent_bits
    field, mantissa = divmod(code - first, 2**mantissa_bits)
    exponent = 0
    if exponent_bits:  # a sign, and the bits below a leading 1
        negative, low = divmod(field, 2 ** (exponent_bits - 1))
        exponent = (2 ** (exponent_bits - 1) + low) * (-1 if negative else 1)
    if exponent == HIF8.max_exponent and mantissa:
        return math.inf
    return math.ldexp(2**mantissa_bits + mantissa, exponent - mantissa_bits)


def check_choice(what: str, value: object, valid: Sequence[object]) -> None:
    """Raise ValueError, naming the valid choices, unless `value` is one of `valid`."""
    # 32.0 == 32 in Python, and a float is no block size: the type must match too.
    if not any(value == choice and isinstance(value, type(choice)) for choice in valid):
        raise ValueError(f"unknown {what} {value!r}; valid: {', '.join(map(str, valid))}")


def check_type(name: object) -> None:
    """Raise ValueError, naming the valid ones, unless `name` is one of QUANT_TYPES."""
    check_choice("quant type", name, QUANT_TYPES)


def check_seed(seed: object) -> None:
    """Raise ValueError unless `seed` is a whole number of 64 bits without a sign."""
    # bool is an int in Python, and `true` is no seed.
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ValueError(f"{seed!r} is no seed; valid: 0 to 2^64 - 1")
