"""The number formats: one table of every type, its constants, and the choices a quantiser takes."""

from collections.abc import Sequence
from dataclasses import dataclass

# The values that a `custom_quant_type` literal in the source may hold.
QUANT_TYPES = ("none", "mxfp8", "mxfp4", "hifp8")

SCALE_RULES = ("floor", "rceil", "ceil", "even")
OVERFLOWS = ("saturate", "inf")
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class MxElement:
    """An element format of OCP Microscaling (MX) v1.0, section 5.3.

    A normal value is ±2^e (1 + M / 2^mantissa_bits) with emin <= e <= emax. Subnormals continue
    below 2^emin in steps of 2^(emin - mantissa_bits).
    """

    name: str
    emax: int
    emin: int
    mantissa_bits: int
    max_value: float


E4M3 = MxElement("e4m3", emax=8, emin=-6, mantissa_bits=3, max_value=448.0)
E5M2 = MxElement("e5m2", emax=15, emin=-14, mantissa_bits=2, max_value=57344.0)
E2M1 = MxElement("e2m1", emax=2, emin=0, mantissa_bits=1, max_value=6.0)

MX_ELEMENTS = {"mxfp8": E4M3, "mxfp4": E2M1, "mxfp8_e5m2": E5M2}

# The reference also knows mxfp8_e5m2, which no source literal may name yet.
REFERENCE_TYPES = (*QUANT_TYPES, "mxfp8_e5m2")

# E8M0, the shared scale of an MX block, holds 2^-127 .. 2^127.
SCALE_EXPONENT_MIN = -127
SCALE_EXPONENT_MAX = 127


@dataclass(frozen=True)
class TaperedFormat:
    """A format whose mantissa narrows as the exponent grows, such as HiFloat8 (arXiv 2409.16626).

    `widths` lists (largest |exponent|, mantissa bits), widest mantissa first; beyond the last
    there are powers of two alone, down to `min_value`.
    """

    name: str
    widths: tuple[tuple[int, int], ...]
    min_value: float
    max_value: float
    overflow_from: float


HIF8 = TaperedFormat(
    "hifp8",
    widths=((3, 3), (7, 2), (15, 1)),
    min_value=2.0**-22,
    max_value=2.0**15,
    overflow_from=1.25 * 2.0**15,
)


def check_choice(what: str, value: object, valid: Sequence[object]) -> None:
    """Raise ValueError, naming the valid choices, unless `value` is one of `valid`."""
    # 32.0 == 32 in Python, and a float is no block size: the type must match too.
    if not any(value == choice and isinstance(value, type(choice)) for choice in valid):
        raise ValueError(f"unknown {what} {value!r}; valid: {', '.join(map(str, valid))}")


def check_type(name: object) -> None:
    """Raise ValueError, naming the valid ones, unless `name` is one of QUANT_TYPES."""
    check_choice("quant type", name, QUANT_TYPES)
