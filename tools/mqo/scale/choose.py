"""Choose the smallest layout that fits the memory and divides the sizes."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from mqo.matrix import layer_pattern
from mqo.matrix.tables import Dtype, Model, Shape, Training
from mqo.scale.layout import Layout, Recompute
from mqo.scale.memory import CONTEXT, Arithmetic, stage_memory
from mqo.scale.simulated import simulated_need

SIZES = (1, 2, 4, 8)
# Shards are multiples of this in every mode, as most formats need, so that all modes of a model
# have the same layouts.
LEAST_BLOCK = 32
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Workload:
    """A training to plan, on `gpus` GPUs in total, `per_node` of them in each machine.

    `limit` is the usable memory of a GPU in bytes; `cached` says that rounded weights are kept.
    `block` is the largest block size of linear layers, 0 without one. `listed` says that the table
    of simulated layouts applies: only fprop, QK and PV are quantized.
    """

    model: Model
    training: Training
    arithmetic: Arithmetic
    dtype: Dtype
    gpus: int
    per_node: int
    limit: int
    cached: bool = False
    block: int = 0
    listed: bool = True


@dataclass(frozen=True)
class Fit:
    """A layout, and the bytes that a GPU of its worst pipeline stage needs.

    They are computed by the formulas, unless the layout was simulated.
    """

    layout: Layout
    need: int
    is_simulated: bool = False


def measure(work: Workload, layout: Layout) -> Fit:
    """Return the memory that the layout needs: as simulated, or else by the formulas."""
    sizes = (work.model, work.training, work.arithmetic, layout)
    simulated = simulated_need(*sizes, work.dtype)
    if simulated is not None and work.listed and not work.cached:
        return Fit(layout, simulated + CONTEXT, is_simulated=True)
    stages = [stage_memory(*sizes, stage, work.dtype) for stage in range(layout.pipeline)]
    memory = max(stages, key=lambda memory: memory.total)
    return Fit(layout, memory.total + memory.cache * work.cached)


def choose(
    work: Workload,
    divides: Callable[[Layout], bool],
    saved: Layout | None = None,
) -> Fit | None:
    """Return the smallest layout that fits; None if no layout fits.

    Preferred, in this order: no recomputation of whole layers, the fewest ranks per copy of the
    model, fewer pipeline stages, fewer expert-parallel ranks, no recomputation of attention.
    `divides` returns whether a layout divides the model's sizes. `saved` is the layout of a
    checkpoint from which the run resumes: only the number of GPUs and recomputation may differ from
    it.
    """
    if saved is None:
        candidates = (each for each in _candidates(work) if _is_whole(work, each))
    else:
        same = replace(saved, gpus=work.gpus)
        candidates = (replace(same, recompute=kind) for kind in _recomputes(work.arithmetic))
    for layout in candidates:
        if divides(layout):
            fit = measure(work, layout)
            if fit.need <= work.limit:
                return fit
    return None


def _recomputes(arithmetic: Arithmetic) -> tuple[Recompute, ...]:
    """Return the useful kinds; recomputing attention saves memory only if scores are kept."""
    return RECOMPUTES if arithmetic.attention == "unfused" else ("none", "full")


def _candidates(work: Workload) -> Iterator[Layout]:
    layouts = [
        Layout(work.gpus, tensor, pipeline, expert, recompute=recompute)
        for tensor, pipeline, expert in itertools.product(SIZES, repeat=3)
        for recompute in _recomputes(work.arithmetic)
        # TP and EP communicate most, so their ranks stay within a machine.
        if tensor * expert <= work.per_node and tensor * pipeline * expert <= work.gpus
    ]
    yield from sorted(
        layouts,
        key=lambda layout: (
            layout.recompute == "full",
            layout.tensor * layout.pipeline,
            layout.pipeline,
            layout.expert,
            RECOMPUTES.index(layout.recompute),
        ),
    )


def _is_whole(work: Workload, layout: Layout) -> bool:
    """Return whether each rank gets whole layers, experts and blocks of linear layers."""
    model = work.model
    if layout.expert > 1 and not model.moe:
        return False
    # Tensor ranks do not split all of latent attention, and the formulas do not count that memory.
    if layout.tensor > 1 and model.mla:
        return False
    if not _has_stages(model, layout.pipeline):
        return False
    if layout.tensor == 1:
        return True
    # A row-parallel layer's inputs: the guard refuses blocks that ranks would cut.
    inputs = [model.heads_size, model.ffn_hidden_size]
    inputs += [model.moe.expert_ffn_size] if model.moe else []
    if mamba := model.mamba:
        if mamba.num_groups % layout.tensor:
            return False
        # Each part of its input projection is split, too.
        inputs += [mamba.inner_size, mamba.num_groups * mamba.state_dim, mamba.num_heads]
    block = max(LEAST_BLOCK, work.block)
    return all(size // layout.tensor % block == 0 for size in inputs)


def _has_stages(model: Shape, stages: int) -> bool:
    """Return whether the layers make this number of pipeline stages, none of them interleaved."""
    if model.pattern is None:
        return model.num_layers % stages == 0
    try:
        return not model.is_interleaved(stages)
    except layer_pattern.PatternError:
        return False
