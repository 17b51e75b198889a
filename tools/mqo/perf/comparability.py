"""Check that timed runs are comparable, and name what differs if they are not."""

from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from mqo.errors import MqoError
from mqo.launch.command import flag_words, from_shell
from mqo.report.collect import Run, collect
from mqo.runs import STEP_TIME, is_run
from mqo.untrusted import read_json_object

RECORD = "perf.json"
LISTED = 6
PROFILED = 3  # steps of the profiled run
Steps = Mapping[int, Annotated[float, Field(gt=0, allow_inf_nan=False)]]


def profiler_flags(steps: int) -> tuple[str, ...]:
    """Return flags for torch's profiler, and for timers that do not wait for other ranks."""
    first = max(1, min(10, steps // 2))
    return (
        *("--profile", "--use-pytorch-profiler", "--profile-step-start", str(first)),
        *("--profile-step-end", str(min(first + PROFILED, steps)), "--profile-ranks", "0"),
        *("--timing-log-level", "2", "--no-barrier-with-level-1-timing"),
    )


# They read clocks and change no result.
PROFILER = frozenset(word for word in profiler_flags(PROFILED) if word.startswith("--"))


@dataclass(frozen=True)
class Timed:
    """One or more equal runs; `repeats` has the {step: seconds} of each.

    `facts` determine the computation: data, seed, steps, flags. `versions` and `machine` are the
    software and the hardware. `types` are the quant types, which may differ.
    """

    name: str
    types: Mapping[str, str]
    facts: Mapping[str, str]
    versions: Mapping[str, str]
    machine: str
    repeats: Annotated[tuple[Steps, ...], Field(min_length=1)]


def timed(*runs: Run) -> Timed:
    """Return the times of runs that differ only in a profiler; profiled steps are left out."""
    first = runs[0]
    for other in runs[1:]:
        check_comparable(timed(first), timed(other))
    return Timed(
        name=first.variant,
        types=dict(first.types),
        facts=_facts(first),
        versions=_versions(first),
        machine=first.machine.line(),
        repeats=tuple(_seconds(run) for run in runs),
    )


def read(folder: Path) -> Timed:
    """Return the times of a folder from `mqo perf`, or of a run; MqoError for others."""
    record = folder / RECORD
    if record.is_file():
        try:
            return Timed(**read_json_object(record)["timed"])
        except (ValueError, KeyError, TypeError) as error:
            raise MqoError(
                f"{record} cannot be read: {error}",
                expected="a file that this version's `mqo perf` wrote",
            ) from None
    return timed(run_of(folder))


def run_of(folder: Path) -> Run:
    """Return the run of a folder; MqoError if it is not a run that succeeded."""
    if not is_run(folder):
        raise MqoError(
            f"{folder} is neither a run nor a folder from `mqo perf`",
            expected=f"a folder with {RECORD} or with cell.json",
        )
    runs, left_out = collect([folder])
    if not runs:
        raise MqoError(f"{folder} cannot be compared: {left_out[0].what}, {left_out[0].reason}")
    return runs[0]


def check_comparable(
    first: Timed, second: Timed, *, allow_versions: bool = False, but: Collection[str] = ()
) -> None:
    """Raise MqoError that names the differences which make two runs not comparable.

    `allow_versions` allows other versions and machines; `but` are names of facts that may differ.
    """
    different = _different(first.facts, second.facts, but)
    if different:
        raise MqoError(
            f"{first.name} and {second.name} differ in their settings: {different}",
            expected="the same data, seed, steps and flags",
        )
    versions = (
        {"machine": first.machine, **first.versions},
        {"machine": second.machine, **second.versions},
    )
    different = "" if allow_versions else _different(*versions, but)
    if different:
        raise MqoError(
            f"{first.name} and {second.name} ran with different software or machines: {different}",
            expected="the same versions, on the same machine",
            help="Pass --allow-versions to compare them anyway",
        )


def _different(first: Mapping[str, str], second: Mapping[str, str], but: Collection[str]) -> str:
    names = sorted({*first, *second} - set(but))
    parts = [
        f"{name} is {first.get(name, 'missing') or 'given'} and {second.get(name, 'missing')}"
        for name in names
        if first.get(name) != second.get(name)
    ]
    more = f", and {len(parts) - LISTED} more" if len(parts) > LISTED else ""
    return ", ".join(parts[:LISTED]) + more


def _facts(run: Run) -> dict[str, str]:
    kept = {name: value for name, value in run.setting.items() if name not in PROFILER}
    own = {"model": run.model, "dataset": run.dataset, "dtype": run.dtype, "seed": run.seed}
    sizes = {"steps": str(run.steps), "tokens of a step": str(run.tokens_per_step)}
    return kept | own | sizes


def _versions(run: Run) -> dict[str, str]:
    own = {"Python": run.python, "Megatron": run.upstream or "?", "commit": run.commit or "?"}
    return own | dict(run.implementation) | dict(run.packages)


def _seconds(run: Run) -> dict[int, float]:
    """Return {step: seconds}, without profiled steps."""
    rows = dict(run.folder.read_metrics().get(STEP_TIME, []))
    command, _ = from_shell(run.command)
    watched: range = range(0)
    if "--use-pytorch-profiler" in command:
        given = flag_words(command)
        first, end = (int(given[f"--profile-step-{at}"][0]) for at in ("start", "end"))
        watched = range(
            first - 1, end + 2
        )  # it starts in the step before, and writes its trace in the step after
    return {step: s for step, s in rows.items() if step not in watched and 0 < s < inf}
