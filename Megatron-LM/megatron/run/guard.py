"""Holds what the run asked for against what its quantisers did, over all ranks."""

from argparse import Namespace
from collections.abc import Iterable

from megatron.quant import (
    RECORDER,
    SITES,
    Layer,
    QuantRecord,
    Reach,
    Setup,
    find_layers,
    find_traps,
    idle_layers,
    merge,
    missing,
    notes,
    other_weights,
    reach,
    reach_faults,
    set_step,
    setup_traps,
    unmatched,
)
from megatron.quant.config import current, is_excluded
from torch.nn import Module

from .observe import end_step
from .ranks import all_ranks, rank
from .record import run_folder
from .setup import Usage, read_setup

_inspected = False
_checked = False
_layers: list[Layer] = []
_usage: Usage | None = None


class GuardError(RuntimeError):
    """The run does not quantise what its mode asks for."""


def before_model(args: Namespace) -> None:
    """Before the model is built: end a run whose arguments alone keep a type from being quantised.

    `args` are upstream's. before_step finds the same later, where a program does not call this.
    """
    if run_folder() is not None:
        _end(setup_traps(current().asked, read_setup(args), is_excluded), "before the model")


def before_step(model: Iterable[Module], args: Namespace) -> None:
    """Before the process's first training step: end a run that cannot quantise as asked.

    `model` are this rank's chunks, as the trainer holds them; `args` are upstream's. Called on
    every rank; the patched trainer does so, before every step. The quantisers learn which one it
    is, so that their random numbers change.
    """
    global _inspected, _layers, _usage
    done = getattr(args, "curr_iteration", 0)
    set_step(done)
    if run_folder() is None:
        return
    RECORDER.begin_step(done + 1)
    if _inspected:
        return
    _inspected = True
    model = list(model)
    found = [one for chunk in model for one in find_layers(chunk)]
    others = [one for chunk in model for one in other_weights(chunk)]
    inspect([one.layer for one in found] + others, read_setup(args))
    asked = {SITES[site].layer for site, wanted in current().asked.items() if wanted != "none"}
    if asked:
        _layers, _usage = [one.layer for one in found], Usage(found, asked)


def after_step(iteration: int) -> None:
    """Write what was measured; after the first step, end a run that did not quantise as asked.

    By then every site has had a forward and a backward pass. Called on every rank, since a pipeline
    stage may hold no site of a kind; the patched trainer does so, after every step.
    """
    global _checked
    set_step(iteration)
    end_step(iteration)
    if _checked or run_folder() is None:
        return
    _checked = True
    when = f"iteration {iteration}"
    check(gather(), when)
    if _usage is not None:
        check_layers(_layers, _usage.close(), when)


def inspect(layers: list[Layer], setup: Setup) -> None:
    """GuardError naming all that would keep a GEMM from being quantised, or excluded, as asked.

    A collective: `layers` are this rank's.
    """
    everywhere = [layer for here in all_ranks(layers) for layer in here]
    asked = current().asked
    faults = unmatched(current().exclude, everywhere)
    _end(faults + find_traps(asked, setup, everywhere, is_excluded), "before the first step")
    _say(notes(asked, everywhere))


def check(records: list[QuantRecord], when: str) -> None:
    """GuardError naming every site that did not run as asked."""
    _end(missing(current().asked, records), when)


def check_layers(layers: list[Layer], used: set[str], when: str) -> None:
    """GuardError naming every layer that ran beside its quantiser; a collective.

    `layers` are this rank's, `used` the names of those that ran. What never ran is said.
    """
    here: Reach = reach(current().asked, layers, used, RECORDER.entries(), is_excluded)
    ranks = all_ranks(here)
    _end(reach_faults(ranks), when)
    _say([f"not used in the first step, so not held to a type: {n}" for n in idle_layers(ranks)])


def gather() -> list[QuantRecord]:
    """The records of all ranks together; a collective."""
    return merge(all_ranks(RECORDER.entries()))


def _say(texts: list[str]) -> None:
    if rank() == 0:
        for text in texts:
            print(f"mqo: {text}", flush=True)


def _end(faults: list[str], when: str) -> None:
    if faults:
        raise GuardError(
            f"the run does not quantise as its mode asks ({when}): {'; '.join(faults)}"
        )
