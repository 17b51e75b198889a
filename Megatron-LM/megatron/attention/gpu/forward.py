"""The forward kernel: a program has a tile of queries, and passes twice over the keys they see.

The first pass finds each row's largest score and its sum of exps, so that the second one has
probabilities, not parts of them: only these can be quantized.
"""

# ruff: noqa: N803  what is known at compile time has a name in capitals, as is Triton's custom
import triton
import triton.language as tl

from .tiles import (
    inverse_of,
    load_rows,
    of_head,
    quantized_probs,
    rows_of_program,
    scores_of,
    softmax_of,
    store_rows,
)


@triton.jit
def _statistics(
    queries, key, key_strides, rows, end, scaling, sizes, dtype: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return each row's largest score, and its sum of exps."""
    largest = tl.full([TILE.rows], float("-inf"), tl.float32)
    exps = tl.full([TILE.rows], 0.0, tl.float32)
    for start in range(0, end, TILE.keys):
        places = start + tl.arange(0, TILE.keys)
        keys = load_rows(key, key_strides, places, sizes.length, sizes.width, TILE.width)
        scores = scores_of(queries, keys, rows, places, scaling, dtype)
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        more = tl.sum(tl.exp(scores - higher[:, None]), axis=1)
        exps = exps * tl.exp(largest - higher) + more
        largest = higher
    return largest, exps


@triton.jit(do_not_specialize=["seed"])
def _kernel(
    query,
    key,
    value,
    out,
    largest,
    exps,
    tensor_amax,
    seed,
    scaling,
    sizes,
    query_strides,
    key_strides,
    value_strides,
    out_strides,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """Write the context of a tile of queries; of each, the largest score and the sum of exps."""
    dtype: tl.constexpr = query.dtype.element_ty
    matrix, rows, end = rows_of_program(sizes, TILE)
    batch, head = matrix // sizes.heads, matrix % sizes.heads
    query = of_head(query, query_strides, batch, head)
    key = of_head(key, key_strides, batch, head // sizes.repeats)
    value = of_head(value, value_strides, batch, head // sizes.repeats)

    queries = load_rows(query, query_strides, rows, sizes.length, sizes.width, TILE.width)
    top, total = _statistics(queries, key, key_strides, rows, end, scaling, sizes, dtype, TILE)
    inverse = inverse_of(total)
    context = tl.full([TILE.rows, TILE.value_width], 0.0, tl.float32)
    for start in range(0, end, TILE.keys):
        places = start + tl.arange(0, TILE.keys)
        keys = load_rows(key, key_strides, places, sizes.length, sizes.width, TILE.width)
        scores = scores_of(queries, keys, rows, places, scaling, dtype)
        softmax = softmax_of(scores, top, inverse, dtype, False)  # rounded below
        probs = quantized_probs(
            softmax, matrix, rows, places, sizes.length, seed, tensor_amax, dtype, STEPS
        )
        values = load_rows(
            value, value_strides, places, sizes.length, sizes.value_width, TILE.value_width
        )
        context = tl.dot(probs, values, context, input_precision="ieee")

    # A NaN must not vanish where the format has no code for it.
    context += (total - total)[:, None]
    out = of_head(out, out_strides, batch, head)
    store_rows(out, out_strides, rows, sizes.length, sizes.value_width, context)
    places_of_rows = matrix.to(tl.int64) * sizes.length + rows
    tl.store(largest + places_of_rows, top, mask=rows < sizes.length)
    tl.store(exps + places_of_rows, total, mask=rows < sizes.length)
