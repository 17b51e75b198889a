"""Chooses a layout for a cell on so many GPUs: the least that its memory and its sizes allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from mqo.errors import LayoutError
from mqo.launch.cell import Cell, Cluster, resolve
from mqo.launch.flags import DTYPES, platform_flags, shape_flags
from mqo.launch.layout import check_layout
from mqo.launch.machine import Machine
from mqo.matrix import tables
from mqo.matrix.tables import BLOCK, NONE, Mode
from mqo.scale.layout import GPUS_PER_NODE, Layout, Recompute
from mqo.scale.memory import GIB, Memory, stage_memory

# What an H100 of 80 GB reports, 79.6 GiB, less a tenth for what the allocator cannot use.
LIMIT = 71 * GIB
SIZES = (1, 2, 4, 8)
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Plan:
    """A layout that fits, with the memory of a GPU of its worst pipeline stage."""

    cell: Cell
    mode: Mode
    layout: Layout
    stage: int
    memory: Memory

    @property
    def micro_batches(self) -> int:
        """Of a rank, in a step."""
        return self.cell.training.global_batch // (
            self.cell.training.micro_batch * self.layout.data
        )

    def command(self) -> str:
        """The job, through Slurm, with names in capitals for what is the user's."""
        model, mode = self.cell.model.name, self.cell.mode
        words = ["sbatch", f"--nodes={self.layout.nodes}", "script/slurm.sbatch"]
        if self.mode.scripts:
            words.append(f"script/{model}/pretrain_{model}_wikipedia_{mode}.sh")
        else:
            words += ["script/train_config.py", "--model", model, "--dataset", "wikipedia"]
            words += ["--quantization", mode]
        words += ["CHECKPOINTS", "TENSORBOARD", "TOKENIZER", "DATA_PREFIX"]
        return " ".join([*words, "--", *self.layout.flags()])


def plan(model: str, mode: str, gpus: int) -> Plan:
    """The least layout for the standard configuration; LayoutError where none fits.

    That is, in this order: without recomputing whole layers, on the fewest ranks a copy of the
    model, with fewer ranks of experts, without recomputing attention.
    """
    for layout in _candidates(gpus):
        cell = cell_of(model, mode, layout)
        if not _runs(cell, layout):
            continue
        stage, memory = worst_stage(cell, layout)
        if memory.total <= LIMIT:
            return Plan(cell, tables.modes()[mode], layout, stage, memory)
    raise LayoutError(
        f"No layout of {model} in mode {mode} fits {gpus} GPUs of {LIMIT // GIB} usable GiB",
        expected=f"one with tensor, pipeline and expert sizes of {SIZES}",
        help="Take more GPUs",
    )


def groups(model: str, gpus: int) -> list[list[Plan]]:
    """The plans of all modes, those of the same layout and memory together, `packed` apart."""
    found: dict[tuple[Layout, Memory], list[Plan]] = {}
    for mode in tables.modes():
        made = plan(model, mode, gpus)
        found.setdefault((made.layout, replace(made.memory, packed=0)), []).append(made)
    return list(found.values())


def meta_job(cell: Cell, layout: Layout, rank: int) -> dict[str, object]:
    """What Megatron-LM/tools/rank_weights.py takes, to build that rank's part of the model."""
    flags = ["--vocab-size", str(cell.model.vocab_size), *shape_flags(cell)]
    flags += [*platform_flags(Machine(1, GPUS_PER_NODE)), *DTYPES[cell.dtype]]
    return {"world": layout.gpus, "rank": rank, "flags": flags}


def cell_of(model: str, mode: str, layout: Layout) -> Cell:
    """The cell of the names at a layout."""
    cluster = Cluster(nnodes=layout.nodes, nproc_per_node=layout.gpus // layout.nodes)
    flags = layout.flags()
    return resolve(model, "wikipedia", mode, "standard", cluster=cluster, extra_flags=flags)


def worst_stage(cell: Cell, layout: Layout) -> tuple[int, Memory]:
    """The pipeline stage that needs the most, and what it needs."""
    mode = tables.modes()[cell.mode]
    stages = [
        stage_memory(cell.model, cell.training, mode, layout, stage)
        for stage in range(layout.pipeline)
    ]
    return max(enumerate(stages), key=lambda one: one[1].total)


def _candidates(gpus: int) -> Iterator[Layout]:
    found = [
        Layout(gpus, tensor, pipeline, expert, recompute)
        for tensor, pipeline, expert in itertools.product(SIZES, repeat=3)
        for recompute in RECOMPUTES
        # What talks most stays within a machine.
        if tensor * expert <= min(GPUS_PER_NODE, gpus) and tensor * pipeline * expert <= gpus
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


def _runs(cell: Cell, layout: Layout) -> bool:
    """Whether the sizes divide as the launcher, upstream and the formats want it."""
    model, mode = cell.model, tables.modes()[cell.mode]
    if layout.expert > 1 and not model.moe:
        return False
    # Nobody measured what latent attention keeps of the parts that tensor ranks do not share.
    if layout.tensor > 1 and model.mla:
        return False
    if layout.recompute == "core_attn" and mode.pv == NONE:
        return False  # a fused kernel keeps no scores
    if model.num_layers % layout.pipeline:
        return False
    try:
        check_layout(cell)
    except LayoutError:
        return False
    # A row-parallel layer's inputs: the guard refuses blocks that ranks would cut.
    inputs = (model.hidden_size, model.ffn_hidden_size)
    return all(size // layout.tensor % BLOCK == 0 for size in inputs)
