"""Attention whose probabilities are quantized in registers, as Triton kernels.

It differs from FlashAttention in two ways. Forward passes over the keys twice, for what is quantized
is the probabilities, which are known after the row's sum is. Backward computes the probabilities
again, with their quantized values for the gradient of the values, and without for the softmax.

No tensor has s x s elements, and no gradient is added up atomically: results are reproducible. Under
TRITON_INTERPRET=1, set before triton is imported, the kernels run on CPU tensors, too.
"""

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from megatron.quant import OperandParts, config
from megatron.quant.formats import NONE
from megatron.quant.gpu import INTERPRETED
from megatron.quant.gpu.arithmetic import OF_THE_TENSOR, Steps, steps_of
from megatron.quant.stochastic import signed
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..chunked import Scores
from . import backward, forward
from .tiles import Scaling, Sizes, Strides, Tile

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256
# Bytes of shared memory that a program may have: of an H100, where the interpreter runs.
_H100 = 227 * 1024


def kernel_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scores: Scores, probs: OperandParts
) -> Tensor:
    """Causal attention of grouped queries in Megatron's layout, differentiable once.

    Scores, probabilities and their gradients are rounded where `chunked_attention` rounds them.

    Args:
        query: [s, b, np, hn], as its GEMM shall see it.
        key: [s, b, ng, hn], also so; np is a multiple of ng.
        value: [s, b, ng, hv], also so; hv may differ from hn.
        scores: their scale, and how the softmax takes them.
        probs: quantizes the probabilities, [b * np, s, s]; gradients pass straight through.

    Returns:
        [s, b, np * hv].

    Raises:
        ValueError: `supports` says why.
    """
    if why := supports(query, key, value, scores, probs):
        raise ValueError(f"no kernel for this attention: {why}")
    return _Kernel.apply(query, key, value, scores, probs)


def supports(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, probs: OperandParts
) -> str:
    """Return why `kernel_attention` cannot take these arguments, "" if it can."""
    return (
        _obstacle_of_operands(query, key, value)
        or _obstacle_of_scores(query.dtype, scores)
        or _obstacle_of_probs(probs)
        or _obstacle_of_memory(query, value, probs)
    )


def _obstacle_of_operands(query: Tensor, key: Tensor, value: Tensor) -> str:
    if not (query.is_cuda or INTERPRETED):
        return f"the device is {query.device.type}"
    if query.dtype not in _DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return f"the dtypes are {query.dtype}, {key.dtype} and {value.dtype}"
    length, batch, heads, width = query.shape
    if key.shape[:2] != (length, batch) or value.shape[:3] != key.shape[:3]:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        return f"the shapes are {shapes}"
    if width != key.size(-1) or heads % key.size(2):
        return f"{heads} heads of {width} do not share {key.size(2)} of {key.size(-1)}"
    if max(width, value.size(-1)) > _WIDEST:
        return f"a head dim is over {_WIDEST}: {width} and {value.size(-1)}"
    return ""


def _obstacle_of_scores(dtype: torch.dtype, scores: Scores) -> str:
    softmax = scores.dtype or dtype
    return "" if softmax == torch.float32 else f"the softmax is in {softmax}"


def _obstacle_of_probs(probs: OperandParts) -> str:
    spec = probs.spec
    if spec.quant_type == NONE:
        return ""
    if spec.tile == "square":
        return "probabilities are quantized in squares"
    if steps_of(spec).scale in OF_THE_TENSOR and probs.amax is None:
        return f"{spec.quant_type} scales by the amax of all probabilities, which is not known"
    if probs.is_watched:
        return "probabilities are measured or kept in this step"
    if config.current().check_nan:
        return "check_nan looks at the probabilities"
    return ""


def _obstacle_of_memory(query: Tensor, value: Tensor, probs: OperandParts) -> str:
    tile, size = _tile(query, value, probs), query.element_size()
    if _stages(tile, size, query.device):
        return ""
    return f"{tile.keys} keys of {tile.width} and {tile.value_width} take too much shared memory"


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: Scores, probs: OperandParts
    ) -> Tensor:
        probs.count()
        work = _Work.of(query, key, value, scores, probs)
        out, statistics = work.forward()
        ctx.save_for_backward(query, key, value, *statistics)
        ctx.scores, ctx.probs = scores, probs
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *statistics = ctx.saved_tensors
        work = _Work.of(query, key, value, ctx.scores, ctx.probs)
        return (*work.backward(grad.unflatten(2, (query.size(2), -1)), *statistics), None, None)


@dataclass(frozen=True)
class _Work:
    """Launches the kernels on operands whose head dims are dense."""

    query: Tensor
    key: Tensor
    value: Tensor
    tile: Tile
    steps: Steps | None
    draws: tuple[Tensor | None, int]  # the amax of all probabilities, and the seed
    scaling: Scaling
    sizes: Sizes

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, scores: Scores, probs: OperandParts
    ) -> "_Work":
        """Take over the arguments of `kernel_attention`."""
        steps = None if probs.spec.quant_type == NONE else steps_of(probs.spec)
        # What a kernel does not use is the same in all calls: it would be compiled for each value.
        amax = probs.amax if steps and steps.scale in OF_THE_TENSOR else None
        seed = 0 if probs.seed is None else signed(probs.seed)
        length, batch, heads, width = query.shape
        factor = 1.0 if scores.factor is None else float(scores.factor)
        return cls(
            *map(_dense, (query, key, value)),
            tile=_tile(query, value, probs),
            steps=steps,
            draws=(amax, seed),
            scaling=Scaling(float(scores.scale), factor),
            sizes=Sizes(length, batch, heads, heads // key.size(2), width, value.size(-1)),
        )

    def forward(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the context [s, b, np, hv], and the rows' statistics, [b * np, s] each."""
        out = self.query.new_empty(*self.query.shape[:3], self.value.size(-1))
        statistics = tuple(self._per_row() for _ in range(2))
        matrices = self.sizes.batch * self.sizes.heads
        operands = (self.query, self.key, self.value, out)
        with self._on_device():
            forward._kernel[(self._row_tiles * matrices,)](
                *map(_seen, operands),
                *statistics,
                *self.draws,
                self.scaling,
                self.sizes,
                *map(Strides.of, operands),
                TILE=self.tile,
                STEPS=self.steps,
                **self._options(self._warps),
            )
        return out, statistics

    def backward(self, grad: Tensor, *statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, of that of the context."""
        inputs = (self.query, self.key, self.value, _dense(grad))
        found = tuple(t.new_empty(t.shape) for t in inputs[:3])
        deltas, sizes = self._per_row(), self.sizes
        shared = (self.scaling, sizes, *map(Strides.of, inputs))
        with self._on_device():
            backward._queries_kernel[(self._row_tiles * sizes.batch * sizes.heads,)](
                *map(_seen, (*inputs, found[0])),
                *statistics,
                deltas,
                *shared,
                Strides.of(found[0]),
                TILE=self.tile,
                **self._options(self._warps),
            )
            key_tiles = triton.cdiv(sizes.length, self.tile.keys)
            backward._keys_kernel[(key_tiles * sizes.batch * self.key.size(2),)](
                *map(_seen, (*inputs, *found[1:])),
                *statistics,
                deltas,
                *self.draws,
                *shared,
                *map(Strides.of, found[1:]),
                TILE=self.tile,
                STEPS=self.steps,
                **self._options(8, most_stages=1 if self._is_wide else 2),
            )
        return found

    @property
    def _row_tiles(self) -> int:
        return triton.cdiv(self.sizes.length, self.tile.rows)

    @property
    def _is_wide(self) -> bool:
        return self.query.dtype == torch.float32

    @property
    def _warps(self) -> int:
        tile = self.tile
        large = max(tile.width, tile.value_width) > 128 or tile.keys > 64
        return 8 if large or self._is_wide else 4

    def _options(self, warps: int, most_stages: int = 2) -> dict[str, int | bool]:
        """Return how Triton shall compile a kernel."""
        stages = _stages(self.tile, self.query.element_size(), self.query.device)
        # Without fusion a product and a sum are the same in all kernels, and so a probability is.
        return {
            "num_warps": warps,
            "num_stages": min(stages, most_stages),
            "enable_fp_fusion": False,
        }

    def _per_row(self) -> Tensor:
        length, batch, heads = self.sizes[:3]
        return self.query.new_empty(batch * heads, length, dtype=torch.float32)

    def _on_device(self) -> Any:
        return torch.cuda.device(self.query.device) if self.query.is_cuda else nullcontext()


def _tile(query: Tensor, value: Tensor, probs: OperandParts) -> Tile:
    """Return what a program takes: whole blocks of keys, and what registers hold."""
    widths = (max(16, triton.next_power_of_2(t.size(-1))) for t in (query, value))
    if query.dtype == torch.float32:
        keys = max(32, probs.block)
        return Tile(max(16, 1024 // keys), keys, *widths)
    return Tile(64, max(64, probs.block), *widths)


def _stages(tile: Tile, size: int, device: torch.device) -> int:
    """Return how many loads of a loop a program's shared memory holds, for elements of `size`.

    0 if it does not hold one.
    """
    least, most = sorted((tile.rows, tile.keys))
    for stages in (2, 1):
        lines = (least + stages * most) * (tile.width + tile.value_width)
        if (lines + tile.rows * tile.keys) * size + 2048 <= _shared_memory(device):
            return stages
    return 0


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return _H100
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _dense(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _seen(x: Tensor) -> Tensor:
    """Return a tensor as a kernel takes it: the interpreter does not round to bfloat16."""
    return x.view(torch.int16) if INTERPRETED and x.dtype == torch.bfloat16 else x
