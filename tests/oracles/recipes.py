"""Published recipes for a linear layer's three GEMMs, in numpy, from their descriptions alone.

    fprop  x [T, K] w [N, K]^T      dgrad  g [T, N] w [N, K]      wgrad  g [T, N]^T x [T, K]

Each operand is brought to [rows, contraction], maybe transformed, and quantized along its last
axis; a GEMM is then the float64 product of the left operand and the transposed right one. Nothing
here imports what it is the oracle of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from .elements import E2M1, E4M3, E5M2, UE5M3, to_dtype
from .formats import (
    fp4_levels,
    fp8_block,
    fp8_tensor,
    hif4,
    mx,
    mxfp4_unbiased,
    mxfp4_unclipped,
    nvfp4,
    ufp4,
)
from .hadamard import NVIDIA_SIGNS, transform


@dataclass(frozen=True)
class How:
    """How an operand is quantized.

    quantize: takes a matrix [rows, contraction] and, where `stochastic`, draws of its shape; None
        for the values to which fprop rounded the operand.
    points, signs: of the Hadamard transform before it; without signs the caller gives them.
    """

    quantize: Callable[..., np.ndarray] | None
    points: int | None = None
    signs: np.ndarray | None = None
    stochastic: bool = False


@dataclass(frozen=True)
class Gemm:
    """What a GEMM multiplies, float32 [rows, contraction] both, and its float64 product."""

    lhs: np.ndarray
    rhs: np.ndarray

    @property
    def product(self) -> np.ndarray:
        """The left operand times the transposed right one."""
        return self.lhs.astype(np.float64) @ self.rhs.astype(np.float64).T


# Site -> its operands, and the axis of each that the GEMM sums over.
GEMMS = {
    "fprop": (("x", 1), ("w", 1)),
    "dgrad": (("g", 1), ("w", 0)),
    "wgrad": (("g", 0), ("x", 0)),
}


def _everywhere(how: How) -> dict[tuple[str, str], How]:
    return {(site, name): how for site, operands in GEMMS.items() for name, _ in operands}


def _backward(how: How) -> dict[tuple[str, str], How]:
    return {place: how for place, how in _everywhere(how).items() if place[0] != "fprop"}


_FP8_X_OR_W, _FP8_G = (How(partial(fp8_tensor, element=element)) for element in (E4M3, E5M2))
_FP8 = _everywhere(_FP8_X_OR_W) | {("dgrad", "g"): _FP8_G, ("wgrad", "g"): _FP8_G}
_ROW, _SQUARE = How(fp8_block), How(partial(fp8_block, square=True))
_NVFP4_W = How(partial(nvfp4, square=True))


def _as_nvfp4(quantize: Callable[..., np.ndarray]) -> dict[tuple[str, str], How]:
    """Return NVIDIA's choices for a format like NVFP4."""
    weight = How(partial(quantize, square=True))
    return {
        ("fprop", "x"): How(quantize),
        ("fprop", "w"): weight,
        ("dgrad", "g"): How(quantize, stochastic=True),
        ("dgrad", "w"): weight,
        ("wgrad", "g"): How(quantize, 16, NVIDIA_SIGNS, stochastic=True),
        ("wgrad", "x"): How(quantize, 16, NVIDIA_SIGNS),
    }


_NVFP4 = _as_nvfp4(nvfp4)
_MXFP8 = How(partial(mx, element=E4M3, rule="rceil"))
_UNCLIPPED_W = How(partial(mxfp4_unclipped, square=True))
_UNCLIPPED_WGRAD = How(mxfp4_unclipped, 32, np.tile(NVIDIA_SIGNS, 2))
_TILE = partial(mx, element=E2M1, rule="rceil", square=True)
_UFP4_G = How(ufp4, 16, NVIDIA_SIGNS, stochastic=True)
# The backward operands that keep the values of the forward pass, and gradients as they are.
_DEQUANTIZED = {("dgrad", "w"): How(None), ("wgrad", "x"): How(None)}

# Recipe -> (site, operand) -> how; an operand that is missing stays as it is.
RECIPES: dict[str, dict[tuple[str, str], How]] = {
    "mxfp8": _everywhere(_MXFP8),
    "fp8-tensorwise": _FP8,
    "fp8-tensorwise-attention": _FP8,  # its attention is in attention_recipes.py
    "fp8-blockwise": _everywhere(_ROW) | {("fprop", "w"): _SQUARE, ("dgrad", "w"): _SQUARE},
    "nvfp4": _NVFP4,
    "mxfp4-backward": _backward(How(mxfp4_unbiased, points=64, stochastic=True)),
    "hif4": _everywhere(How(hif4)),
    "mxfp4-hadamard": _everywhere(How(partial(mx, element=E2M1, rule="even"), 16, np.ones(16))),
    "mxfp4-h32": {
        ("fprop", "x"): How(mxfp4_unclipped),
        ("fprop", "w"): _UNCLIPPED_W,
        ("dgrad", "g"): How(mxfp4_unclipped, stochastic=True),
        ("dgrad", "w"): _UNCLIPPED_W,
        ("wgrad", "g"): _UNCLIPPED_WGRAD,
        ("wgrad", "x"): _UNCLIPPED_WGRAD,
    },
    "mxfp4-qkv-mxfp8": _everywhere(How(_TILE))
    | {(site, "g"): How(_TILE, stochastic=True) for site in ("dgrad", "wgrad")},
    "nvfp4-nemotron3": _NVFP4,
    "nvfp4-four-over-six": _as_nvfp4(partial(fp4_levels, scale=E4M3, error="mse")),
    "nvfp4-ue5m3": _as_nvfp4(partial(fp4_levels, scale=UE5M3)),
    "mxfp8-dequantized": {("fprop", "x"): _MXFP8, ("fprop", "w"): _MXFP8} | _DEQUANTIZED,
    "nvfp4-dequantized": {("fprop", "x"): How(nvfp4), ("fprop", "w"): _NVFP4_W} | _DEQUANTIZED,
    "ufp4": _everywhere(How(ufp4, 16, NVIDIA_SIGNS))
    | {(site, "g"): _UFP4_G for site in ("dgrad", "wgrad")},
}


def linear(
    recipe: str,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "float32",
    draws: Mapping[tuple[str, str], np.ndarray] | None = None,
    signs: Mapping[str, np.ndarray] | None = None,
    exact: bool = False,
) -> dict[str, Gemm]:
    """Return the three GEMMs of a layer under a recipe.

    Args:
        recipe: a key of RECIPES.
        tensors: `x`, `w` and `g`, float32 arrays of the values of `dtype`.
        dtype: 'float32' or 'bfloat16': what a transformed operand is rounded to, and a quantized
            one, too, as fake quantization keeps it in the tensor's dtype.
        draws: (site, operand) -> integers below 2^24 for what rounds stochastically, in the layout
            of the tensor, its contraction axis padded to whole transforms. Where they are
            missing, elements go to the nearest.
        signs: site -> the signs of its transform, for a recipe that has none of its own.
        exact: leave quantized operands as the values that codes and scales stand for.
    """
    operands = {}
    for site, pair in GEMMS.items():
        for name, axis in pair:
            how = RECIPES[recipe].get((site, name))
            drawn = (draws or {}).get((site, name))
            matrix, drawn = (_rows(array, axis) for array in (tensors[name], drawn))
            if how is not None and how.points is not None:
                own = how.signs if how.signs is not None else signs[site]
                matrix = to_dtype(transform(matrix, own), dtype)
            if how is not None and how.quantize is None:
                matrix = _rows(operands["fprop", name], axis)
            elif how is not None:
                extra = {"draws": drawn} if how.stochastic else {}
                matrix = how.quantize(matrix, **extra)
                matrix = matrix if exact else to_dtype(matrix, dtype)
            operands[site, name] = matrix
    return {
        site: Gemm(operands[site, lhs], operands[site, rhs])
        for site, ((lhs, _), (rhs, _)) in GEMMS.items()
    }


def drawn_shapes(
    recipe: str, tensors: Mapping[str, np.ndarray]
) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the shape of what each operand that rounds stochastically draws, for `linear`."""
    found = {}
    for site, pair in GEMMS.items():
        for name, axis in pair:
            how = RECIPES[recipe].get((site, name))
            if how is not None and how.stochastic:
                shape = list(tensors[name].shape)
                shape[axis] += -shape[axis] % (how.points or 1)
                found[site, name] = tuple(shape)
    return found


def _rows(array: np.ndarray | None, axis: int) -> np.ndarray | None:
    """Return a matrix with the contraction axis last."""
    return array if array is None or axis == 1 else np.ascontiguousarray(array.T)
