"""Round to the values of small floating-point elements by looking them up in a sorted grid.

Everything is float64, in which the values, their midpoints and every float32 are exact.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

DRAW_BITS = 24  # of the uniform integers that stochastic rounding takes


@dataclass(frozen=True)
class Element:
    """A sign, an exponent from `emin` up, `mantissa_bits`, and subnormals below 2^emin."""

    mantissa_bits: int
    emin: int
    emax: int
    largest: float

    @cached_property
    def grid(self) -> np.ndarray:
        """All values that are not negative, in the order of their codes."""
        steps = 2**self.mantissa_bits
        subnormal = [i / steps * 2.0**self.emin for i in range(steps)]
        normal = [
            (1 + i / steps) * 2.0**e for e in range(self.emin, self.emax + 1) for i in range(steps)
        ]
        return np.array([value for value in subnormal + normal if value <= self.largest])


E4M3 = Element(3, -6, 8, 448.0)
UE5M3 = Element(3, -14, 15, 61440.0)  # of scales, which have no sign
E5M2 = Element(2, -14, 15, 57344.0)
E2M1 = Element(1, 0, 2, 6.0)
E2M3 = Element(3, 0, 2, 7.5)
E3M2 = Element(2, -2, 4, 28.0)
INT8 = Element(6, 0, 0, 127 / 64)  # 64ths, up to 127 of them
INT4 = Element(2, 0, 0, 1.75)  # fourths, up to seven of them


def nearest(x: np.ndarray, element: Element) -> np.ndarray:
    """Return the nearest value of `element`, the one of the even code where two are as near.

    What is too large becomes the largest; a zero keeps its sign.
    """
    lower, upper, magnitude = _neighbors(x, element)
    low, high = element.grid[lower], element.grid[upper]
    middle = (low + high) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (lower % 2 == 1))
    return np.copysign(np.where(up, high, low), x)


def stochastic(x: np.ndarray, element: Element, draws: np.ndarray) -> np.ndarray:
    """Return the value of `element` below or above, by `draws` of 24-bit integers.

    At the share f of the way up, it is the one above where the draw is less than floor(f 2^24).
    """
    lower, upper, magnitude = _neighbors(x, element)
    low, high = element.grid[lower], element.grid[upper]
    share = (magnitude - low) / np.where(high > low, high - low, 1.0)
    up = draws < np.floor(share * 2.0**DRAW_BITS)
    return np.copysign(np.where(up, high, low), x)


def _neighbors(x: np.ndarray, element: Element) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes around each magnitude, and the magnitudes, the largest at most."""
    x = np.asarray(x, dtype=np.float64)
    magnitude = np.minimum(np.abs(x), element.largest)
    lower = np.searchsorted(element.grid, magnitude, side="right") - 1
    return lower, np.minimum(lower + 1, len(element.grid) - 1), magnitude


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round finite float32 to the values of bfloat16, ties to even; float32 again."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def to_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the values of 'float32' or 'bfloat16'; the result is a float32 array."""
    single = np.asarray(x).astype(np.float32)
    return bfloat16(single) if dtype == "bfloat16" else single
