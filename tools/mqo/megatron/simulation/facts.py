"""Convert the results of a simulation to JSON, for `mqo simulate`."""

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mqo.megatron.simulation.memory import Window
from mqo.megatron.simulation.program import Step, Trainer
from mqo.megatron.simulation.rows import KINDS

POINTS = 1200  # of the timeline
LINES = 200  # source lines that are listed at the peak
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def facts(ran: Trainer) -> dict[str, Any]:
    """Return the rank's position, weights, memory, work and exchanges.

    Work and exchanges are from the last two steps, which differ only in micro-batches.
    """
    from megatron.core import mpu

    last = ran.steps[-1]
    window = ran.memory.between(last.start + 1, last.end)
    peaks = [int(_totals(ran, step).max()) for step in ran.steps]
    before = ran.memory.between(0, ran.steps[0].start).curves().sum(axis=0)
    return {
        "rank": torch.distributed.get_rank(),
        "world": torch.distributed.get_world_size(),
        "stage": mpu.get_pipeline_model_parallel_rank(),
        "stages": mpu.get_pipeline_model_parallel_world_size(),
        "chunks": len(ran.models),
        "micro_batch": ran.args.micro_batch_size,
        "sequence": ran.args.seq_length,
        "data": mpu.get_data_parallel_world_size(),
        "global_batch": ran.args.global_batch_size,
        "parameters": sum(p.numel() for model in ran.models for p in model.parameters()),
        "setup_peak": int(before.max()),
        "step_peaks": peaks,
        **memory(window),
        "steps": [step_facts(step) for step in ran.steps[-2:]],
    }


def memory(window: Window) -> dict[str, Any]:
    """Return a step's peak, the tensors at the peak, and the bytes of each kind over the step."""
    curves = window.curves()
    total = curves.sum(axis=0)
    peak = int(total.argmax())
    shown = _shown(total)
    return {
        "peak": int(total[peak]),
        "kinds": dict(zip(KINDS, curves[:, peak].tolist(), strict=True)),
        "at_peak": window.by_line(window.start + peak)[:LINES],
        "timeline": {"operation": shown.tolist(), "operations": len(total)}
        | dict(zip(KINDS, curves[:, shown].tolist(), strict=True)),
    }


def step_facts(step: Step) -> dict[str, Any]:
    """Return a step's work and exchanges, summed over layers that differ only in numbers."""
    works: Counter = Counter()
    for work, calls in step.works.counts.items():
        works[work._replace(layer=_NUMBER.sub("*", work.layer))] += calls
    exchanges = [
        exchange._asdict() | {"wire": exchange.wire, "calls": calls}
        for exchange, calls in step.collectives.counts.items()
    ]
    return {
        "micro_batches": step.micro_batches,
        "works": [work._asdict() | {"calls": calls} for work, calls in works.items()],
        "exchanges": exchanges,
    }


def _totals(ran: Trainer, step: Step) -> np.ndarray:
    return ran.memory.between(step.start + 1, step.end).curves().sum(axis=0)


def _shown(total: np.ndarray) -> np.ndarray:
    """Return the operations to plot: of each interval the one with the most memory."""
    edges = np.linspace(0, len(total), min(POINTS, len(total)) + 1).astype(int)
    return np.array([a + int(total[a:b].argmax()) for a, b in pairwise(edges)])
