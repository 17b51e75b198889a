"""Choose the smallest layout that fits the memory and divides the sizes."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from mqo.matrix.tables import Dtype, Model, Training
from mqo.scale.layout import Layout, Recompute
from mqo.scale.memory import CONTEXT, Arithmetic, Memory, worst_stage
from mqo.scale.simulated import simulated_need

SIZES = (1, 2, 4, 8)
# Every mode keeps blocks of this length whole, as most formats need it, so that modes of a model
# share their layouts.
LEAST_BLOCK = 32
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Job:
    """A training to plan, on `gpus` GPUs in total, `per_node` of them in each machine.

    `limit` is the usable memory of a GPU in bytes; `cached` says that rounded weights are kept;
    `block` is the longest block along which linear layers are quantized, 0 without one. `listed`
    says that the table of simulated layouts may include it: types only in fprop, QK and PV.
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
    """A layout, with the memory of a GPU of its worst pipeline stage; `need` is in bytes.

    `memory` is computed by the formulas, and so is `need` unless the layout was simulated.
    """

    layout: Layout
    stage: int
    memory: Memory
    need: int
    is_simulated: bool = False


def measure(job: Job, layout: Layout) -> Fit:
    """Return the memory that the layout needs: as simulated, or else by the formulas."""
    computed = compute(job, layout)
    simulated = simulated_need(job.model, job.training, job.arithmetic, layout, job.dtype)
    if simulated is None or job.cached or not job.listed:
        return computed
    return replace(computed, need=simulated + CONTEXT, is_simulated=True)


def compute(job: Job, layout: Layout) -> Fit:
    """Return the memory that the layout needs, by the formulas."""
    stage, memory = worst_stage(job.model, job.training, job.arithmetic, layout, job.dtype)
    return Fit(layout, stage, memory, memory.total + memory.cache * job.cached)


def choose(
    job: Job,
    divides: Callable[[Layout], bool],
    saved: Layout | None = None,
    measure: Callable[[Job, Layout], Fit] = measure,
) -> Fit | None:
    """Return the smallest layout that fits; None if no layout fits.

    Preferred, in this order: no recomputation of whole layers, the fewest ranks per copy of the
    model, fewer expert-parallel ranks, no recomputation of attention. `divides` returns whether a
    layout divides the model's sizes. `saved` is the layout of a checkpoint from which the run
    resumes: only the number of GPUs and recomputation may differ from it.
    """
    if saved is None:
        candidates = (one for one in _candidates(job) if _is_whole(job, one))
    else:
        same = replace(saved, gpus=job.gpus)
        candidates = (replace(same, recompute=how) for how in _recomputes(job.arithmetic))
    for layout in candidates:
        if divides(layout):
            found = measure(job, layout)
            if found.need <= job.limit:
                return found
    return None


def _recomputes(arithmetic: Arithmetic) -> tuple[Recompute, ...]:
    """Return the useful recomputations: without unfused attention no scores are kept."""
    return RECOMPUTES if arithmetic.attention == "unfused" else ("none", "full")


def _candidates(job: Job) -> Iterator[Layout]:
    found = [
        Layout(job.gpus, tensor, pipeline, expert, recompute=recompute)
        for tensor, pipeline, expert in itertools.product(SIZES, repeat=3)
        for recompute in _recomputes(job.arithmetic)
        # The sizes that communicate the most stay within a machine.
        if tensor * expert <= job.per_node and tensor * pipeline * expert <= job.gpus
    ]
    yield from sorted(
        found,
        key=lambda one: (
            one.recompute == "full",
            one.tensor * one.pipeline,
            one.pipeline,
            one.expert,
            RECOMPUTES.index(one.recompute),
        ),
    )


def _is_whole(job: Job, layout: Layout) -> bool:
    """Return whether the layout cuts no layer, expert or block of a linear layer."""
    model = job.model
    if layout.expert > 1 and not model.moe:
        return False
    # The memory of the parts of latent attention that tensor ranks do not split is not measured.
    if layout.tensor > 1 and model.mla:
        return False
    if model.num_layers % layout.pipeline:
        return False
    if layout.tensor == 1:
        return True
    # A row-parallel layer's inputs: the guard refuses blocks that ranks would cut.
    inputs = (model.hidden_size, model.ffn_hidden_size)
    block = max(LEAST_BLOCK, job.block)
    return all(size // layout.tensor % block == 0 for size in inputs)
