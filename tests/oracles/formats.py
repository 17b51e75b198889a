"""What each format makes of a float32 matrix [rows, contraction]: the values that it stands for.

Blocks run along the last axis, and the last one may be short. Scales are float32 arithmetic, in the
order of the published code; elements and their products with scales are float64, where the latter
are rounded to float32. `draws`, integers below 2^24 in the shape of the matrix, round
stochastically; without them elements go to the nearest, ties to even.
"""

import numpy as np

from .elements import E2M1, E4M3, INT4, INT8, UE5M3, Element, bfloat16, nearest, stochastic

Draws = np.ndarray | None
_MAX = np.finfo(np.float32).max
_ONE = np.float32(1)


def mx(
    x: np.ndarray,
    element: Element,
    rule: str,
    block: int = 32,
    square: bool = False,
    draws: Draws = None,
):
    """OCP MX v1.0: blocks times a power of two, by the rule 'floor', 'rceil' or 'even'.

    floor: 2^floor(log2 amax) over that of the element's largest. even, AMD's: the same of an amax
    that is rounded, halves up, to the element's mantissa. rceil, NVIDIA's: the smallest power of
    two that takes amax to the element's largest or below it.
    """
    amax = block_amax(x, block, square)
    scale = 2.0 ** spread(_mx_exponent(amax, element, rule), block, x)
    return _decoded(_rounded(x / scale, element, draws), scale)


def mxfp4_unbiased(x: np.ndarray, draws: np.ndarray, block: int = 32):
    """MXFP4 of arXiv 2502.20586: x, on average over the draws.

    The scale is that of x by the rule 'floor'. What is rounded is 3/4 x over it, since the largest
    elements would be clipped, between 6 and 8; what comes out is divided by 3/4.
    """
    scale = 2.0 ** spread(_mx_exponent(block_amax(x, block), E2M1, "floor"), block, x)
    values = _decoded(stochastic(0.75 * x.astype(np.float64) / scale, E2M1, draws), scale)
    return values / np.float32(0.75)


def mxfp4_unclipped(x: np.ndarray, square: bool = False, draws: Draws = None, least: float = 0.0):
    """MXFP4 of MrHuff/mfu-fp4-training: amax <= s, a power of two, and 6 x / s is rounded.

    With `least`, s is halved for blocks whose amax is less than this share of it, which clips.
    """
    amax = block_amax(x, 32, square).astype(np.float64)
    fraction, exponent = np.frexp(amax)
    top = 2.0 ** np.where(fraction == 0.5, exponent - 1, exponent)
    top = spread(np.where(amax < least * top, top / 2, top), 32, x)
    return _decoded(_rounded(6 * x.astype(np.float64) / top, E2M1, draws), top / 6)


def ufp4(x: np.ndarray, draws: Draws = None):
    """UFP4 of arXiv 2606.20381: multiples of a float32, seven up and seven down, for 16 elements.

    The order of the float32 operations is the one of FP8 in blocks.
    """
    scale = _to_top(block_amax(x, 16), INT4)
    steps = np.clip(x * spread(scale, 16, x), np.float32(-1.75), np.float32(1.75))
    return _decoded(_rounded(steps, INT4, draws), spread(_ONE / scale, 16, x))


def _mx_exponent(amax: np.ndarray, element: Element, rule: str) -> np.ndarray:
    amax = amax.astype(np.float64)
    if rule == "floor":
        exponent = np.frexp(amax)[1] - 1 - element.emax
    elif rule == "even":
        fraction, exponent = np.frexp(amax)
        steps = 2.0 ** (element.mantissa_bits + 1)
        rounded = np.floor(fraction * steps + 0.5) / steps
        exponent = exponent - 1 + (rounded == 1.0) - element.emax
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


def fp4_levels(
    x: np.ndarray,
    scale: Element,
    error: str = "",
    square: bool = False,
    draws: Draws = None,
    amax: float | None = None,
):
    """NVFP4 with E4M3 or UE5M3 `scale`s, and four over six by `error`, 'mse' or 'mae'.

    `amax` is that of the tensor; values beyond it saturate. What is not finite makes all NaN.
    """
    amax = np.float32(np.abs(x).max(initial=0) if amax is None else amax)
    if not np.isfinite(amax):
        return np.full_like(x, np.nan)
    bound = 256 if error and scale is E4M3 else 448
    with np.errstate(divide="ignore", over="ignore"):
        tensor = np.minimum(np.float32(6 * bound) / amax, _MAX) if amax else _ONE
    return _with_levels(x, tensor, scale, error, square, draws)


def fp4_blocks(x: np.ndarray, square: bool = False, draws: Draws = None):
    """FP4 of arXiv 2509.17791: UE5M3 takes the amax of a block to 6; the tensor has no scale.

    What is not finite makes its block NaN.
    """
    broken = ~np.isfinite(block_amax(x, 16, square))
    values = _with_levels(np.nan_to_num(x, posinf=0, neginf=0), _ONE, UE5M3, "", square, draws)
    return np.where(spread(broken, 16, x), np.float32(np.nan), values)


def _with_levels(x, tensor, scale: Element, error: str, square: bool, draws: Draws):
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        share = block_amax(x, 16, square) * (tensor * (_ONE / np.float32(6)))
        candidates = (share, share * np.float32(1.5))
        six, four = (nearest(candidate, scale).astype(np.float32) for candidate in candidates)
        chosen = six
        if error:
            of_six, of_four = (_block_errors(x, s, tensor, error, square) for s in (six, four))
            chosen = np.where((of_four < of_six) | (six == 0), four, six)
        steps = x * spread(_encode(chosen, tensor), 16, x)
    decode = chosen * (_ONE / tensor)
    return _decoded(_rounded(steps, E2M1, draws), spread(decode, 16, x))


def _encode(scale: np.ndarray, tensor: np.float32) -> np.ndarray:
    return np.minimum(_ONE / (scale * (_ONE / tensor)), _MAX)


def _block_errors(x, scale, tensor, error: str, square: bool) -> np.ndarray:
    """The errors of blocks: elements' errors are whole numbers of 2^-19, and their sum is exact."""
    steps = np.abs(x) * spread(_encode(scale, tensor), 16, x)
    # An error beyond 16 is that of two equal scales, or of a scale of 0, which is not taken.
    off = np.minimum(np.abs(nearest(steps, E2M1) - steps), 16).astype(np.float32)
    units = np.rint((off * off if error == "mse" else off).astype(np.float64) * 2**19)
    rows, size = units.shape
    padded = np.pad(units, ((0, -rows % 16 if square else 0), (0, -size % 16)))
    sums = padded.reshape(len(padded), -1, 16).sum(axis=2)
    if square:
        sums = sums.reshape(-1, 16, sums.shape[1]).sum(axis=1).repeat(16, axis=0)
    weight = scale * scale if error == "mse" else scale
    return sums[:rows].astype(np.float32) * weight


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


def int8_block(x: np.ndarray, square: bool = False):
    """INT8 of arXiv 2603.02170: a float32 takes the amax of 1x128 or 128x128 elements to 127.

    The order of the float32 operations is the one of FP8 in blocks; zero has no sign.
    """
    scale = _to_top(block_amax(x, 128, square), INT8)
    steps = np.clip(x * spread(scale, 128, x), np.float32(-127 / 64), np.float32(127 / 64))
    return _decoded(nearest(steps, INT8), spread(_ONE / scale, 128, x)) + np.float32(0)


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
