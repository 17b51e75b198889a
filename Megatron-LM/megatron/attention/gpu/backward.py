"""The backward kernels: probabilities are computed again from each row's statistics.

The gradient of a softmax needs each row's sum of probabilities times their gradients. The context
does not give it, as its probabilities were rounded: the kernel for the queries passes over the keys
once more for it, and leaves it to the kernel for the keys.
"""

# ruff: noqa: N803  what is known at compile time has a name in capitals, as is Triton's custom
import triton
import triton.language as tl
from megatron.quant.gpu.arithmetic import stored

from .tiles import (
    for_dot,
    inverse_of,
    load_rows,
    of_head,
    product,
    quantized_probs,
    rounded,
    rows_of_program,
    scores_of,
    softmax_of,
    store_rows,
)


@triton.jit
def _of_scores(softmax, of_probs, delta, scaling, dtype: tl.constexpr) -> tl.tensor:
    """Return the gradient of the scores as a product takes it."""
    found = softmax * (of_probs - delta[:, None]) * scaling.factor
    return for_dot(stored(found, dtype, False))


@triton.jit
def _of_keys(
    of_rows,
    of_places,
    strides,
    scaling,
    sizes,
    dtype: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a tile of keys, and what a tile of queries has of it: softmax, and its gradient."""
    queries, grads, rows, top, inverse = of_rows
    key, value, places = of_places
    keys = load_rows(key, strides[0], places, sizes.length, sizes.width, TILE.width)
    values = load_rows(value, strides[1], places, sizes.length, sizes.value_width, TILE.value_width)
    scores = scores_of(queries, keys, rows, places, scaling, dtype)
    of_probs = rounded(product(grads, values), dtype)
    return keys, softmax_of(scores, top, inverse, dtype, HALF), of_probs


@triton.jit
def _queries_kernel(
    query,
    key,
    value,
    grad,
    out,
    largest,
    exps,
    deltas,
    scaling,
    sizes,
    query_strides,
    key_strides,
    value_strides,
    grad_strides,
    out_strides,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Write the gradient of a tile of queries, and to `deltas` the sum of each row."""
    dtype: tl.constexpr = query.dtype.element_ty
    matrix, rows, end = rows_of_program(sizes, TILE)
    batch, head = matrix // sizes.heads, matrix % sizes.heads
    query = of_head(query, query_strides, batch, head)
    key = of_head(key, key_strides, batch, head // sizes.repeats)
    value = of_head(value, value_strides, batch, head // sizes.repeats)
    grad = of_head(grad, grad_strides, batch, head)

    queries = load_rows(query, query_strides, rows, sizes.length, sizes.width, TILE.width)
    grads = load_rows(grad, grad_strides, rows, sizes.length, sizes.value_width, TILE.value_width)
    statistics = matrix.to(tl.int64) * sizes.length + rows
    inside = rows < sizes.length
    top = tl.load(largest + statistics, mask=inside, other=0.0)
    inverse = inverse_of(tl.load(exps + statistics, mask=inside, other=1.0))

    delta = tl.full([TILE.rows], 0.0, tl.float32)
    for start in range(0, end, TILE.keys):
        places = start + tl.arange(0, TILE.keys)
        keys, softmax, of_probs = _of_keys(
            (queries, grads, rows, top, inverse),
            (key, value, places),
            (key_strides, value_strides),
            scaling,
            sizes,
            dtype,
            TILE,
            HALF,
        )
        delta += tl.sum(softmax * of_probs, axis=1)
    tl.store(deltas + statistics, delta, mask=inside)

    found = tl.full([TILE.rows, TILE.width], 0.0, tl.float32)
    for start in range(0, end, TILE.keys):
        places = start + tl.arange(0, TILE.keys)
        keys, softmax, of_probs = _of_keys(
            (queries, grads, rows, top, inverse),
            (key, value, places),
            (key_strides, value_strides),
            scaling,
            sizes,
            dtype,
            TILE,
            HALF,
        )
        of_scores = _of_scores(softmax, of_probs, delta, scaling, dtype)
        found = tl.dot(of_scores, keys, found, input_precision="ieee")
    out = of_head(out, out_strides, batch, head)
    store_rows(out, out_strides, rows, sizes.length, sizes.width, found * scaling.scale)


@triton.jit(do_not_specialize=["seed"])
def _keys_kernel(
    query,
    key,
    value,
    grad,
    key_out,
    value_out,
    largest,
    exps,
    deltas,
    tensor_amax,
    seed,
    scaling,
    sizes,
    query_strides,
    key_strides,
    value_strides,
    grad_strides,
    key_out_strides,
    value_out_strides,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Write the gradients of a tile of keys and values, summed over the heads that share them."""
    dtype: tl.constexpr = query.dtype.element_ty
    # The keys that most queries see first; neighbors share queries.
    groups = sizes.heads // sizes.repeats
    matrix = tl.program_id(0) % (sizes.batch * groups)
    first = tl.program_id(0) // (sizes.batch * groups) * TILE.keys
    batch, group = matrix // groups, matrix % groups
    places = first + tl.arange(0, TILE.keys)
    key = of_head(key, key_strides, batch, group)
    value = of_head(value, value_strides, batch, group)
    keys = load_rows(key, key_strides, places, sizes.length, sizes.width, TILE.width)
    values = load_rows(
        value, value_strides, places, sizes.length, sizes.value_width, TILE.value_width
    )

    of_keys = tl.full([TILE.keys, TILE.width], 0.0, tl.float32)
    of_values = tl.full([TILE.keys, TILE.value_width], 0.0, tl.float32)
    # The heads of the group, and of each the rows that see a key.
    seen = first // TILE.rows
    tiles = tl.cdiv(sizes.length, TILE.rows) - seen
    for i in range(sizes.repeats * tiles):
        head = group * sizes.repeats + i // tiles
        rows = (seen + i % tiles) * TILE.rows + tl.arange(0, TILE.rows)
        queries = load_rows(
            of_head(query, query_strides, batch, head),
            query_strides,
            rows,
            sizes.length,
            sizes.width,
            TILE.width,
        )
        grads = load_rows(
            of_head(grad, grad_strides, batch, head),
            grad_strides,
            rows,
            sizes.length,
            sizes.value_width,
            TILE.value_width,
        )
        row_matrix = batch * sizes.heads + head
        statistics = row_matrix.to(tl.int64) * sizes.length + rows
        inside = rows < sizes.length
        top = tl.load(largest + statistics, mask=inside, other=0.0)
        inverse = inverse_of(tl.load(exps + statistics, mask=inside, other=1.0))
        delta = tl.load(deltas + statistics, mask=inside, other=0.0)

        scores = scores_of(queries, keys, rows, places, scaling, dtype)
        softmax = softmax_of(scores, top, inverse, dtype, HALF)
        probs = quantized_probs(
            softmax, row_matrix, rows, places, sizes.length, seed, tensor_amax, dtype, STEPS
        )
        of_values = tl.dot(tl.trans(probs), grads, of_values, input_precision="ieee")
        of_probs = rounded(product(grads, values), dtype)
        of_scores = _of_scores(softmax, of_probs, delta, scaling, dtype)
        of_keys = tl.dot(tl.trans(of_scores), queries, of_keys, input_precision="ieee")

    key_out = of_head(key_out, key_out_strides, batch, group)
    value_out = of_head(value_out, value_out_strides, batch, group)
    store_rows(key_out, key_out_strides, places, sizes.length, sizes.width, of_keys * scaling.scale)
    store_rows(value_out, value_out_strides, places, sizes.length, sizes.value_width, of_values)
