"""The quantizers as Triton kernels, bit for bit equal to the reference.

A program processes a tile of the tensor in the same steps for every format: load, amax of each
block, scale, round, store. The differences between formats are in `Steps`, which are known at
compile time.

Nothing waits for the device, and everything may be captured in a CUDA graph. With
TRITON_INTERPRET=1, set before triton is imported, the kernels also run on CPU tensors.
"""

# ruff: noqa: N803  names of compile-time values are in capitals, as is usual with Triton
import math
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from mqo.quant.gpu.arithmetic import GOLDEN, draw_from, loaded, quantized, stored
from mqo.quant.gpu.steps import OF_THE_TENSOR, steps_of
from mqo.quant.gpu.tiles import Strides, dealt, in_order, of_row, offset, plan_tiles, positions
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import signed


@triton.jit(do_not_specialize=["seed"])
def _kernel(
    x,
    out,
    tensor_amax,
    seed,
    index_strides,
    sizes,
    x_strides,
    out_strides,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Quantize a tile of a tensor whose rows have `sizes.size` elements.

    GIVEN means that the tensor's amax was passed, which may lack a NaN of the tensor.
    """
    row, position = positions(sizes, TILE)
    inside = (row < sizes.rows) & (position < sizes.size)

    values = loaded(tl.load(x + offset(row, position, sizes, x_strides), mask=inside, other=0))
    draw = tl.zeros(values.shape, tl.int32)
    if STEPS.rounding == "stochastic":
        # Multiply the parts before the sum: there are fewer of them.
        first = seed + (of_row(row, sizes, index_strides) + 1) * GOLDEN
        draw = draw_from(first + (position * index_strides.size) * GOLDEN)

    values, draw = in_order(values, TILE), in_order(draw, TILE)
    result = dealt(quantized(values, draw, tensor_amax, STEPS, GIVEN), TILE)
    target = out + offset(row, position, sizes, out_strides)
    tl.store(target, stored(result, out.dtype.element_ty, STEPS.exact), mask=inside)


INTERPRETED = not isinstance(_kernel, triton.JITFunction)

_NO_STRIDES = Strides(0, 0, 0, 0)


def qdq(
    x: Tensor,
    spec: QuantSpec,
    axis: int = -1,
    out: Tensor | None = None,
    seed: int | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """Quantize as `backend.fake_quantize`, which checks the arguments.

    Return None for a tensor that is not on a CUDA device, unless in Triton's interpreter.
    """
    if not (x.is_cuda or INTERPRETED):
        return None
    target = torch.empty_like(x) if out is None else out
    if not x.numel() or _launch(x, target, spec, axis, seed, amax):
        return target
    dense = x.contiguous()  # fewer dimensions, since those of a dense tensor can be merged
    result = torch.empty_like(dense)
    return target.copy_(result) if _launch(dense, result, spec, axis, seed, amax) else None


def _launch(
    x: Tensor, out: Tensor, spec: QuantSpec, axis: int, seed: int | None, amax: Tensor | None
) -> bool:
    """Quantize `x` into `out`; return False if it has too many dimensions for the kernel."""
    steps = steps_of(spec)
    blocks = (axis, spec.block) if spec.block else (None, steps.run)
    plan = plan_tiles(x.shape, x.stride(), out.stride(), *blocks, steps.side)
    if plan is None:
        return False
    given = amax is not None
    if steps.scale not in OF_THE_TENSOR:
        amax, given = None, False
    elif amax is None:
        # A single launch, which reads `x` once and does not wait; a NaN counts as the largest.
        amax = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
    # Unused arguments are constant, because Triton compiles the kernel for each value.
    draws = (0, _NO_STRIDES)
    if spec.rounding == "stochastic":
        assert seed is not None  # `backend.fake_quantize` checks it
        draws = (signed(seed), plan.draws)
    seen = torch.int16 if x.dtype == torch.bfloat16 else x.dtype
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _kernel[(plan.programs,)](
            x.view(seen),
            out.view(seen),
            amax,
            *draws,
            plan.sizes,
            plan.x,
            plan.out,
            TILE=plan.tile,
            STEPS=steps,
            GIVEN=given,
            num_warps=plan.warps,
        )
    return True
