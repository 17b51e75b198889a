"""Launches the kernels: on which tiles, with which options."""

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from megatron.quant import OperandParts
from megatron.quant.formats import NONE
from megatron.quant.gpu import INTERPRETED
from megatron.quant.gpu.steps import OF_THE_TENSOR, Steps, steps_of
from megatron.quant.stochastic import signed
from torch import Tensor

from ..chunked import Scores
from . import backward, forward
from .tiles import Scaling, Sizes, Strides, Tile

# Bytes of shared memory that a program may have on an H100.
H100_BYTES = 227 * 1024


@dataclass(frozen=True)
class Work:
    """Launches the kernels on operands whose head dims are dense."""

    query: Tensor
    key: Tensor
    value: Tensor
    tile: Tile
    steps: Steps | None
    draws: tuple[Tensor | None, int]  # the amax of all probabilities, and the seed
    scaling: Scaling
    half: bool  # whether the softmax is in half precision
    sizes: Sizes

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, scores: Scores, probs: OperandParts
    ) -> "Work":
        """Take over the arguments of `kernel_attention`."""
        steps = None if probs.spec.quant_type == NONE else steps_of(probs.spec)
        # What a kernel does not use is the same in all calls: it would be compiled for each value.
        amax = probs.amax if steps and steps.scale in OF_THE_TENSOR else None
        seed = 0 if probs.seed is None else signed(probs.seed)
        length, batch, heads, width = query.shape
        factor = 1.0 if scores.factor is None else float(scores.factor)
        return cls(
            *map(_dense, (query, key, value)),
            tile=tile_of(query, value, probs),
            steps=steps,
            draws=(amax, seed),
            scaling=Scaling(float(scores.scale), factor),
            half=(scores.dtype or query.dtype) != torch.float32,
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
                HALF=self.half,
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
                HALF=self.half,
                **self._options(8, most_stages=1 if self._is_float32 else 2),
            )
        return found

    @property
    def _row_tiles(self) -> int:
        return triton.cdiv(self.sizes.length, self.tile.rows)

    @property
    def _is_float32(self) -> bool:
        return self.query.dtype == torch.float32

    @property
    def _warps(self) -> int:
        tile = self.tile
        large = max(tile.width, tile.value_width) > 128 or tile.keys > 64
        return 8 if large or self._is_float32 else 4

    def _options(self, warps: int, most_stages: int = 2) -> dict[str, int | bool]:
        """Return how Triton shall compile a kernel."""
        stages = stages_of(self.tile, self.query.element_size(), self.query.device)
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


def tile_of(query: Tensor, value: Tensor, probs: OperandParts) -> Tile:
    """Return what a program takes: whole blocks of keys, and what registers hold."""
    widths = (max(16, triton.next_power_of_2(t.size(-1))) for t in (query, value))
    if query.dtype == torch.float32:
        keys = max(32, probs.block)
        return Tile(max(16, 1024 // keys), keys, *widths)
    return Tile(64, max(64, probs.block), *widths)


def stages_of(tile: Tile, size: int, device: torch.device) -> int:
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
        return H100_BYTES
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def _dense(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _seen(x: Tensor) -> Tensor:
    """Return a tensor as a kernel takes it: the interpreter does not round to bfloat16."""
    return x.view(torch.int16) if INTERPRETED and x.dtype == torch.bfloat16 else x
