"""What the kernels of both directions share: their shapes, and the steps on a tile of scores."""

# ruff: noqa: N803  what is known at compile time has a name in capitals, as is Triton's custom
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from megatron.quant.gpu.arithmetic import draw_of, loaded, quantized, stored
from torch import Tensor

from ..chunks import HIDDEN

_HIDDEN = tl.constexpr(HIDDEN)


class Strides(NamedTuple):
    """Strides of a tensor [s, b, heads, d] whose last one is 1, in elements."""

    row: int
    batch: int
    head: int

    @classmethod
    def of(cls, heads: Tensor) -> "Strides":
        """Return those of a tensor."""
        return cls(*heads.stride()[:3])


class Sizes(NamedTuple):
    """Sizes of the operands: `heads` query heads, of which `repeats` share a key and a value.

    `width` is the head dim of queries and keys, `value_width` that of values.
    """

    length: int
    batch: int
    heads: int
    repeats: int
    width: int
    value_width: int


class Scaling(NamedTuple):
    """What scores are multiplied by: before they are rounded, and after."""

    scale: float
    factor: float


@dataclass(frozen=True)
class Tile:
    """What a program has of the scores, rows times keys, and head dims that are powers of two."""

    rows: int
    keys: int
    width: int
    value_width: int


# -- on the device ---------------------------------------------------------------------------------


@triton.jit
def rows_of_program(sizes, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a program's matrix, its rows, and the end of the keys that they see.

    The longest rows come first; neighbors share keys.
    """
    matrices = sizes.batch * sizes.heads
    first = (tl.cdiv(sizes.length, TILE.rows) - 1 - tl.program_id(0) // matrices) * TILE.rows
    end = tl.minimum(first + TILE.rows, sizes.length)
    return tl.program_id(0) % matrices, first + tl.arange(0, TILE.rows), end


@triton.jit
def for_dot(values) -> tl.tensor:
    """Return values of a dtype of memory as a product takes them."""
    if values.dtype == tl.int16:  # bfloat16 in the interpreter, which cannot multiply it
        return loaded(values)
    else:
        return values


@triton.jit
def rounded(values, dtype: tl.constexpr) -> tl.tensor:
    """Round float32 to the values of a dtype of memory."""
    return loaded(stored(values, dtype, False))


@triton.jit
def of_head(x, strides, batch, head) -> tl.tensor:
    """Return a pointer to a head's first row."""
    return x + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head


@triton.jit
def _places(strides, rows, WIDTH: tl.constexpr) -> tl.tensor:
    return (rows.to(tl.int64) * strides.row)[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _inside(rows, length, width, WIDTH: tl.constexpr) -> tl.tensor:
    return (rows < length)[:, None] & (tl.arange(0, WIDTH) < width)[None, :]


@triton.jit
def load_rows(x, strides, rows, length, width, WIDTH: tl.constexpr) -> tl.tensor:
    """Load rows of a head, [rows, WIDTH], zeros where there are none."""
    inside = _inside(rows, length, width, WIDTH)
    return for_dot(tl.load(x + _places(strides, rows, WIDTH), mask=inside, other=0))


@triton.jit
def store_rows(x, strides, rows, length, width, values) -> None:
    """Store float32 [rows, WIDTH] to a head, rounded to its dtype."""
    inside = _inside(rows, length, width, values.shape[1])
    target = x + _places(strides, rows, values.shape[1])
    tl.store(target, stored(values, x.dtype.element_ty, False), mask=inside)


@triton.jit
def product(left, right) -> tl.tensor:
    """Return left [m, k] times right [n, k] transposed, in float32."""
    return tl.dot(left, tl.trans(right), input_precision="ieee")


@triton.jit
def scores_of(query, key, rows, places, scaling, dtype: tl.constexpr) -> tl.tensor:
    """Return the scores [rows, places] of queries and keys as the softmax takes them."""
    scores = rounded(product(query, key) * scaling.scale, dtype) * scaling.factor
    return tl.where(rows[:, None] >= places[None, :], scores, _HIDDEN)


@triton.jit
def softmax_of(scores, largest, inverse, dtype: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """Return probabilities, by each row's largest score, and one over its sum of exps.

    They are rounded if the softmax is in half precision.
    """
    found = tl.exp(scores - largest[:, None]) * inverse[:, None]
    if HALF:
        found = rounded(found, dtype)
    return found


@triton.jit
def inverse_of(exps) -> tl.tensor:
    """Return one over the sum of exps."""
    return tl.div_rn(tl.full(exps.shape, 1.0, tl.float32), exps)


@triton.jit
def quantized_probs(
    softmax,
    matrix,
    rows,
    places,
    length,
    seed,
    tensor_amax,
    dtype: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """Return probabilities as the product with the values takes them.

    They are rounded to the operands' dtype first, as upstream's are.
    """
    probs = stored(softmax, dtype, False)
    if STEPS is None:
        return for_dot(probs)
    else:
        probs = loaded(probs)
        draw = tl.zeros(probs.shape, tl.int32)
        if STEPS.rounding == "stochastic":
            row = matrix.to(tl.int64) * length + rows
            draw = draw_of(row[:, None] * length + places[None, :], seed)
        probs = quantized(probs, draw, tensor_amax, STEPS)
        return for_dot(stored(probs, dtype, STEPS.exact))
