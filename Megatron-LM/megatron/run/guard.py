"""Holds what the run asked for against what its quantisers did, over all ranks."""

from argparse import Namespace
from collections.abc import Iterable
from typing import TypeVar

import torch
from megatron.quant import (
    RECORDER,
    Layer,
    QuantRecord,
    find_layers,
    merge,
    missing,
    set_step,
    unmatched,
)
from megatron.quant.config import current
from torch.nn import Module

from .record import run_folder

_inspected = False
_checked = False
T = TypeVar("T")


class GuardError(RuntimeError):
    """The run does not quantise what its mode asks for."""


def before_step(model: Iterable[Module], args: Namespace) -> None:
    """Before the process's first training step: end a run that cannot quantise as asked.

    `model` are this rank's chunks, as the trainer holds them; `args` are upstream's. Called on
    every rank; the patched trainer does so, before every step. The quantisers learn which one it
    is, so that their random numbers change.
    """
    global _inspected
    set_step(getattr(args, "curr_iteration", 0))
    if _inspected or run_folder() is None:
        return
    _inspected = True
    found = [pair for chunk in model for pair in find_layers(chunk)]
    inspect([layer for layer, _ in found])


def after_step(iteration: int) -> None:
    """After the process's first training step: end a run that did not quantise as asked.

    By then every site has had a forward and a backward pass. Called on every rank, since a pipeline
    stage may hold no site of a kind; the patched trainer does so, after every step.
    """
    global _checked
    set_step(iteration)
    if _checked or run_folder() is None:
        return
    _checked = True
    check(gather(), f"iteration {iteration}")


def inspect(layers: list[Layer]) -> None:
    """GuardError naming all that would keep a GEMM from being quantised, or excluded, as asked.

    A collective: `layers` are this rank's.
    """
    everywhere = [layer for here in all_ranks(layers) for layer in here]
    _end(unmatched(current().exclude, everywhere), "before the first step")


def check(records: list[QuantRecord], when: str) -> None:
    """GuardError naming every site that did not run as asked."""
    _end(missing(current().asked, records), when)


def gather() -> list[QuantRecord]:
    """The records of all ranks together; a collective."""
    return merge(all_ranks(RECORDER.entries()))


def all_ranks(here: T) -> list[T]:
    """What every rank has, by rank; a collective. It must be picklable."""
    if not torch.distributed.is_initialized():
        return [here]
    ranks = [here] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, here)
    return ranks


def _end(faults: list[str], when: str) -> None:
    if faults:
        raise GuardError(
            f"the run does not quantise as its mode asks ({when}): {'; '.join(faults)}"
        )
