"""Compare what the run should quantize with what its quantizers did, over all ranks."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.nn import Module

from mqo.megatron.coverage import coverage_faults, idle_layers, ineffective, missing, site_coverage
from mqo.megatron.cut_blocks import cut_blocks
from mqo.megatron.layers import FoundLayer, find_layers, other_weights
from mqo.megatron.run import disk, divergence, engine, estimators, implementation, plugin_states
from mqo.megatron.run.checkpoints import CheckpointError, keep_last
from mqo.megatron.run.files import run_folder
from mqo.megatron.run.modelopt import quantized_layers
from mqo.megatron.run.nan import watch
from mqo.megatron.run.observe import end_step
from mqo.megatron.run.packages import record_packages
from mqo.megatron.run.ranks import data_rank, rank
from mqo.megatron.run.resumed_types import keep_types
from mqo.megatron.run.setup import Usage, read_chunk_tokens
from mqo.megatron.traps import find_traps, notes, setup_traps
from mqo.quant.collectives import all_ranks
from mqo.quant.config import current
from mqo.quant.excludes import unmatched
from mqo.quant.formats import SITES
from mqo.quant.labels import Layer
from mqo.quant.measurement import merge
from mqo.quant.progress import set_step
from mqo.quant.quant_config import QuantConfig
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER, Key, QuantRecord

# The layers of the model, once `_inspect_model` has found them.
_labeled: list[FoundLayer] | None = None
# For the step to check: the layers that run, and the calls before it.
_usage: Usage | None = None
_calls: dict[Key, int] = {}
# Whether a step or a final validation began in this process, and the number of begun steps.
_began, _steps = False, 0
# Upstream's arguments, where it stores the iteration of the loaded checkpoint.
_args: Namespace | None = None
# The types of the last checked step. A schedule changes them during a run.
_checked: dict[str, str] | None = None


# The sites of a forward pass, which a validation runs.
_FORWARD = ("fprop", "qk", "pv")


class GuardError(RuntimeError):
    """The run does not quantize what its mode requires."""


def before_model(args: Namespace) -> None:
    """End a run before its model is built, if its arguments prevent the quantization of a site.

    `args` are upstream's. `before_step` repeats the check, for programs that skip this function.
    """
    global _args
    _args = args
    if run_folder() is not None:
        faults = setup_traps(ever_asked(current()), args, current().is_excluded)
        _end(faults, "before the model")


def before_step(model: Iterable[Module], args: Namespace, optimizer: Any = None) -> None:
    """End a run that cannot quantize as configured, before the first training step of the process.

    `model` are this rank's chunks in the trainer; `args` are upstream's, and so is `optimizer`,
    which is recorded. The patched trainer calls this on every rank before every step. It also sets
    the step and the rank of the quantizers, so that their random numbers change.
    """
    global _usage, _calls, _began, _steps
    _began, _steps = True, _steps + 1
    done = getattr(args, "curr_iteration", 0)
    _set_draws(done, args)
    divergence.begin_step(args)
    plugin_states.begin_step(args)
    if run_folder() is None:
        return
    PROCESS.begin_step(done + 1)
    keep_last(current().keep_checkpoints)
    if _labeled is None:
        model = list(model)
        if optimizer is not None:
            implementation.record(model, optimizer)
        _inspect_model(model, args)
        _say(keep_types(args, current()) + disk.begin_run(model, args))
    types = asked_now()
    if types != _checked:
        _calls = {record.key: record.calls for record in RECORDER.entries()}
        _usage = _watch_layers(types)


def before_validation(model: Iterable[Module], args: Namespace, iteration: int) -> None:
    """Prepare the final validation of a training that ended in an earlier process.

    The patched trainer calls this on every rank before every validation. It does nothing if a step
    or a validation already ran in this process. If none did, no step will run: the random numbers
    of stochastic rounding and the schedules are set as in the process that trained the last step,
    and the model is checked as before a first step.

    Raises:
        CheckpointError: the checkpoint was trained with other types than this run's.
        GuardError: the validation cannot quantize as configured.
    """
    global _usage, _began
    if _began:
        return
    _began = True
    _set_draws(iteration, args)
    if run_folder() is None:
        return
    model = list(model)
    _inspect_model(model, args)
    if changed := keep_types(args, current()):
        raise CheckpointError(
            f"iteration {iteration} is the last step, and nothing is left to train: "
            f"{'; '.join(changed)}. Expected: the types of the checkpoint. Give these types, give "
            "another CHECKPOINT, or train longer with `-- --train-samples`"
        )
    _usage = _watch_layers(asked_now(forward_only=True))


def steps_begun() -> int:
    """Return the number of training steps that began in this process."""
    return _steps


def _set_draws(done: int, args: Namespace) -> None:
    """Set the step and the rank of the quantizers, which determine their random numbers."""
    set_step(done, getattr(args, "train_iters", None))
    PROCESS.micro_batches.set_replica(*data_rank())


def _inspect_model(model: list[Module], args: Namespace) -> None:
    """Find the layers of a model, and end a run that cannot quantize them as configured."""
    global _labeled
    if current().check_nan:
        watch(model)
    _labeled = [labeled for chunk in model for labeled in find_layers(chunk)]
    engine.prepare(model, args)
    others = [layer for chunk in model for layer in other_weights(chunk)]
    inspect([labeled.layer for labeled in _labeled] + others, args)
    check_alone(quantized_layers(model))
    check_cuts(_labeled, args)
    _end(estimators.attach(_labeled), "before the first step")


def _watch_layers(types: Mapping[str, str]) -> Usage | None:
    """Start to record which layers run, of the kinds that `types` quantize."""
    kinds = {SITES[site].layer for site, wanted in types.items() if wanted != "none"}
    return Usage(_labeled or (), kinds) if kinds else None


def after_step(iteration: int) -> None:
    """Write measurements; GuardError if the first step with these types was not as configured.

    By then every site has had a forward and a backward pass. After a measured step, also end a run
    with a quantizer that changes nothing. The patched trainer calls this on every rank after every
    step, because a pipeline stage may have no site of a kind.
    """
    global _checked
    types = asked_now()
    if run_folder() is not None and types != _checked:
        _checked = types
        _check_step(types, since(_calls, RECORDER.entries()), f"iteration {iteration}")
        record_packages()
    measured = run_folder() is not None and RECORDER.measuring
    end_step(iteration)
    plugin_states.end_step(iteration)
    if measured:
        _end(ineffective(gather()), f"iteration {iteration}")
    set_step(iteration)


def asked_now(*, forward_only: bool = False) -> dict[str, str]:
    """Return the type that each site should have at this step."""
    sites = {site: PROCESS.scheduled(site, wanted) for site, wanted in current().asked.items()}
    return {site: t for site, t in sites.items() if site in _FORWARD or not forward_only}


def since(calls: Mapping[Key, int], records: Iterable[QuantRecord]) -> list[QuantRecord]:
    """Return the records with more calls than in `calls`, each with the number of new calls."""
    more = ((record, record.calls - calls.get(record.key, 0)) for record in records)
    return [replace(record, calls=n) for record, n in more if n]


def inspect(layers: list[Layer], args: Namespace) -> None:
    """Raise GuardError for each reason why a GEMM would not be quantized or excluded as configured.

    A collective: `layers` are this rank's.
    """
    everywhere = [layer for here in all_ranks(layers) for layer in here]
    config = current()
    patterns = (*config.exclude, *config.include, *(rule.layers for rule in config.rules))
    faults = unmatched(patterns, everywhere) + current().contradictions()
    types = ever_asked(current())
    faults += find_traps(types, args, everywhere, current().is_excluded)
    _end(faults, "before the first step")
    _say(notes(types, everywhere))


def check_alone(others: list[str]) -> None:
    """Raise GuardError if ModelOpt also quantizes layers: this rank's `others`.

    A collective.
    """
    names = sorted({name for here in all_ranks(others) for name in here})
    sites = {s: wanted for s, wanted in ever_asked(current()).items() if wanted != "none"}
    if names and sites:
        types = ", ".join(f"{site} as {wanted}" for site, wanted in sites.items())
        fault = (
            f"ModelOpt quantizes {len(names)} layers of this checkpoint, such as {names[0]}, and "
            f"the source quantizes {types}: pass --quantization bf16 to leave it to ModelOpt"
        )
        _end([fault], "before the first step")


def check_cuts(layers: list[FoundLayer], args: Namespace) -> None:
    """Raise GuardError for every block that this layout splits; a collective."""
    blocks, squares = current().blocks(), current().squares()
    here = cut_blocks(blocks, squares, layers, read_chunk_tokens(args), current().is_excluded)
    _end(sorted({text for texts in all_ranks(here) for text in texts}), "before the first step")


def ever_asked(options: QuantConfig) -> dict[str, str]:
    """Return the first type of each site other than none; none if it is never quantized."""
    types = {site: [phase.quant_type for phase in options.phases(site)] for site in SITES}
    return {site: next((t for t in ts if t != "none"), "none") for site, ts in types.items()}


def check_all(records: list[QuantRecord]) -> None:
    """Raise GuardError for every site that did not run as configured, or without effect.

    `records` are of all ranks. A site with a schedule was checked when each of its types began. If
    only the final validation ran, backward GEMMs are not checked. A collective.
    """
    _end(ineffective(records), "at the end")
    if not _steps and (_began or _trained_before()):
        if _began:  # not with --eval-iters 0
            _check_step(asked_now(forward_only=True), RECORDER.entries(), "final validation")
        return
    options = current()
    types = {s: wanted for s, wanted in options.asked.items() if s not in options.schedule}
    rest = [record for record in records if record.site not in options.schedule]
    _end(missing(types, rest), "at the end")


def _trained_before() -> bool:
    """Return whether the loaded checkpoint is of the last step, so that no step runs."""
    done, total = (getattr(_args, name, None) for name in ("iteration", "train_iters"))
    return total is not None and 0 < total <= (done or 0)


def _check_step(types: Mapping[str, str], here: list[QuantRecord], when: str) -> None:
    """Raise GuardError for every site or layer that a step or a validation did not quantize so.

    A collective: `here` are this rank's records. Layers that never ran are printed.
    """
    global _usage
    _end(missing(types, merge(all_ranks(here))), when)
    if _usage is None:
        return
    used, _usage = _usage.close(), None
    ranks = all_ranks(site_coverage(types, [x.layer for x in _labeled or ()], used, here))
    _end(coverage_faults(ranks), when)
    idle = idle_layers(ranks)
    _say([f"not used in the first step, so its type is not checked: {name}" for name in idle])


def gather() -> list[QuantRecord]:
    """Gather the records of all ranks; a collective."""
    return merge(all_ranks(RECORDER.entries()))


def _say(texts: list[str]) -> None:
    if rank() == 0:
        for text in texts:
            print(f"mqo: {text}", flush=True)


def _end(faults: list[str], when: str) -> None:
    if faults:
        raise GuardError(
            f"the run does not quantize as its mode requires ({when}): {'; '.join(faults)}"
        )
