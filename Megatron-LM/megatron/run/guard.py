"""Holds what the run asked for against what its quantisers did, over all ranks."""

import torch
from megatron.quant import RECORDER, QuantRecord, merge, missing, set_step
from megatron.quant.config import current

from .record import run_folder

_checked = False


class GuardError(RuntimeError):
    """The run does not quantise what its mode asks for."""


def after_step(iteration: int) -> None:
    """After the process's first training step: end a run that did not quantise as asked.

    By then every site has had a forward and a backward pass. Called on every rank, since a pipeline
    stage may hold no site of a kind; the patched trainer does so, after every step. The quantisers
    learn here that the next one begins, so that their random numbers change.
    """
    global _checked
    set_step(iteration)
    if _checked or run_folder() is None:
        return
    _checked = True
    check(gather(), f"iteration {iteration}")


def check(records: list[QuantRecord], when: str) -> None:
    """GuardError naming every site that did not run as asked."""
    faults = missing(current().asked, records)
    if faults:
        raise GuardError(
            f"the run does not quantise as its mode asks ({when}): {'; '.join(faults)}"
        )


def gather() -> list[QuantRecord]:
    """The records of all ranks together; a collective."""
    if not torch.distributed.is_initialized():
        return RECORDER.entries()
    ranks: list[list[QuantRecord]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(ranks, RECORDER.entries())
    return merge(ranks)
