"""What each format makes of a float32 matrix [rows, contraction]: the values that it stands for.

Blocks run along the last axis, and the last one may be short. Scales are float32 arithmetic, in the
order of the published code; elements and their products with scales are float64, where the latter
are rounded to float32. `draws`, integers below 2^24 in the shape of the matrix, round
stochastically; without them elements go to the nearest, ties to even.
"""

import numpy as np

from .elements import E2M1, E4M3, Element, bfloat16, nearest, stochastic

Draws = np.ndarray | None
_MAX = np.finfo(np.float32).max
_ONE = np.float32(1)


def mx(x: np.ndarray, element: Element, rule: str, block: int = 32, draws: Draws = None):
    """OCP MX v1.0: blocks times a power of two, by the rule 'floor' or 'rceil'.

    floor: 2^floor(log2 amax) over that of the element's largest. rceil, NVIDIA's: the smallest
    power of two that takes amax to the element's largest or below it.
    """
    scale = 2.0 ** spread(_mx_exponent(block_amax(x, block), element, rule), block, x)
    return _decoded(_rounded(x / scale, element, draws), scale)


def mxfp4_unbiased(x: np.ndarray, draws: np.ndarray, block: int = 32):
    """MXFP4 of arXiv 2502.20586: x, on average over the draws.

    The scale is that of x by the rule 'floor'. What is rounded is 3/4 x over it, since the largest
    elements would be clipped, between 6 and 8; what comes out is divided by 3/4.
    """
    scale = 2.0 ** spread(_mx_exponent(block_amax(x, block), E2M1, "floor"), block, x)
    values = _decoded(stochastic(0.75 * x.astype(np.float64) / scale, E2M1, draws), scale)
    return values / np.float32(0.75)


def _mx_exponent(amax: np.ndarray, element: Element, rule: str) -> np.ndarray:
    amax = amax.astype(np.float64)
    if rule == "floor":
        exponent = np.frexp(amax)[1] - 1 - element.emax
    else:  # a quotient of a power of two is one half to frexp
        fraction, exponent = np.frexp(amax / element.largest)
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    return np.where(amax > 0, np.clip(exponent, -127, 127), -127)


def nvfp4(x: np.ndarray, square: bool = False, draws: Draws = None):
    """NVFP4 of arXiv 2509.25149, blocks of 1x16 or 16x16: E2M1 x E4M3 x a float32 of the tensor."""
    amax = block_amax(x, 16, square)
    with np.errstate(divide="ignore", over="ignore"):
        tensor = np.minimum(np.float32(448 * 6) / np.abs(x).max(), _MAX)
        tensor = _ONE if tensor == 0 else tensor
        fraction = np.minimum(amax * (tensor * (_ONE / np.float32(6))), np.float32(448))
        scale = nearest(fraction, E4M3).astype(np.float32) * (_ONE / tensor)
        encode = spread(np.minimum(_ONE / scale, _MAX), 16, x)
        steps = np.clip(x * encode, np.float32(-6), np.float32(6))
    return _decoded(_rounded(steps, E2M1, draws), spread(scale, 16, x))


def fp8_tensor(x: np.ndarray, element: Element):
    """Current scaling: one float32 scale for the tensor, which takes amax to the largest value."""
    scale = _to_top(np.abs(x).max(), element)
    return _decoded(nearest(x * scale, element), _ONE / scale)


def fp8_block(x: np.ndarray, square: bool = False, power_of_two: bool = True):
    """E4M3 in blocks of 1x128 or 128x128, as DeepSeek-V3's; scales are rounded down to 2^n."""
    scale = _to_top(block_amax(x, 128, square), E4M3)
    if power_of_two:
        scale = np.ldexp(_ONE, np.frexp(scale)[1] - 1)
    steps = np.clip(x * spread(scale, 128, x), np.float32(-448), np.float32(448))
    return _decoded(nearest(steps, E4M3), spread(_ONE / scale, 128, x))


def hif4(x: np.ndarray):
    """HiFloat4 of arXiv 2602.11287: 64 elements, a scale, and powers of two for each 8 and 4.

    What is not finite makes its 64 elements NaN.
    """
    amax = block_amax(x, 64)
    broken = ~np.isfinite(amax)
    scale = bfloat16(np.where(broken, _ONE, amax) * bfloat16(_ONE / np.float32(7)))
    scale = _e6m2(np.clip(scale, np.float32(2.0**-48), np.float32(49152)))
    inverse = spread(bfloat16(_ONE / scale), 64, x)
    with np.errstate(invalid="ignore"):
        eights = np.where(spread(block_amax(x, 8), 8, x) * inverse >= 4, 2, 1).astype(np.float32)
        fours = spread(block_amax(x, 4), 4, x) * inverse / eights
        fours = np.where(fours >= 2, 2, 1).astype(np.float32)
        mantissa = bfloat16(np.abs(x) * inverse / eights / fours).astype(np.float64)
    code = np.minimum(np.floor(4 * mantissa + 0.5), 7)
    values = np.copysign(code / 4 * eights * fours, x) * spread(scale, 64, x)
    return np.where(spread(broken, 64, x), np.nan, values).astype(np.float32)


def _e6m2(x: np.ndarray) -> np.ndarray:
    """Round positive float32 to two bits of mantissa, ties to even."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * 8).astype(np.float32), exponent - 3)


# -- blocks and scales -------------------------------------------------------------------------


def block_amax(x: np.ndarray, block: int, square: bool = False) -> np.ndarray:
    """Return the largest magnitude around each block of `x` [rows, n]: [rows, blocks]."""
    rows, size = x.shape
    padded = np.pad(np.abs(x), ((0, -rows % block if square else 0), (0, -size % block)))
    amax = padded.reshape(len(padded), -1, block).max(axis=2)
    if square:
        tiles = amax.reshape(-1, block, amax.shape[1]).max(axis=1)
        amax = tiles.repeat(block, axis=0)
    return amax[:rows]


def spread(factors: np.ndarray, block: int, like: np.ndarray) -> np.ndarray:
    """Give each element of `like` [rows, n] the factor [rows, blocks] of its block."""
    return factors.repeat(block, axis=1)[:, : like.shape[1]]


def _to_top(amax: np.ndarray, element: Element) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.minimum(np.float32(element.largest) / amax, _MAX)
    return np.where(amax == 0, _ONE, scale).astype(np.float32)


def _rounded(steps: np.ndarray, element: Element, draws: Draws) -> np.ndarray:
    return nearest(steps, element) if draws is None else stochastic(steps, element, draws)


def _decoded(elements: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (elements * scale).astype(np.float32)
