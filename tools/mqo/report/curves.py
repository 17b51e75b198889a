"""The curves of a comparison or of some runs: runs that differ only in the seed share one."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mqo.errors import RunError
from mqo.launch.command import flag_table, without_flag
from mqo.launch.config import RunConfig
from mqo.launch.libraries import UNNAMED
from mqo.launch.run import Result
from mqo.matrix.tables import NONE
from mqo.report.collect import Run, changed_quantization, quantizing_libraries
from mqo.report.colors import Look
from mqo.report.compare import Group
from mqo.report.looks import by_variant, looks
from mqo.report.series import DIFFERENCES, Band, band, less
from mqo.run_records import QuantToml, parsed
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder, Series, last_of_each_step

MOST = 8  # in one picture; more are hard to read
SEED = "--seed"


@dataclass(frozen=True)
class Curve:
    """Losses over steps, in nats per token, of runs that differ only in their seeds.

    `difference` is the training loss minus that of the baseline's run of the same seed. `chance`
    is ln(vocabulary size), if it is known.
    """

    name: str
    label: str
    look: Look
    loss: Band
    difference: Band
    valid: Band
    chance: float | None = None


def of_group(group: Group) -> list[Curve]:
    """Return one curve per variant, in the order of `group.rows`."""
    known = by_variant(group.rows)
    return [
        _curve(row.variant, row.label, known[row.variant], row.runs, row.pairs)
        for row in group.rows
    ]


def _curve(
    name: str,
    label: str,
    look: Look,
    runs: Sequence[Run | _Single],
    pairs: Iterable[tuple[Run | _Single, Run | _Single]],
) -> Curve:
    """Return the curve of runs; `pairs` are those with a baseline of the same seed, and it."""
    return Curve(
        name=name,
        label=label,
        look=look,
        loss=band([run.train for run in runs]),
        difference=band([less(run.train, base.train) for run, base in pairs], DIFFERENCES),
        valid=band([run.valid for run in runs]),
        chance=math.log(runs[0].vocabulary) if runs[0].vocabulary else None,
    )


def first(group: Group) -> list[str]:
    """Return the variants that are shown at first, at most MOST.

    These are the baseline, the verdict's choice, and in turn what quantizes most of each format.
    """
    named = [name for name in (group.baseline_variant, group.verdict.choice) if name]
    formats: dict[tuple[str, ...], list[str]] = {}
    for row in reversed(group.rows):
        formats.setdefault(tuple(sorted({*row.types.values()} - {NONE})), []).append(row.variant)
    longest = max(map(len, formats.values()))
    turns = (names[n] for n in range(longest) for names in formats.values() if n < len(names))
    there = {row.variant for row in group.rows}
    return [name for name in dict.fromkeys((*named, *turns)) if name in there][:MOST]


# -- of run folders --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Single:
    """A run from its folder, finished or not.

    `about` names model, dataset and configuration. `setting` is everything but the quantization.
    """

    mode: str
    variant: str
    about: str
    setting: str
    seed: str
    types: tuple[tuple[str, str], ...]
    is_baseline: bool
    train: Series
    valid: Series
    vocabulary: int | None


def of_runs(folders: Iterable[RunFolder]) -> tuple[str, list[Curve]]:
    """Return the curves of runs that may be unfinished; runs that differ in seed share one.

    The title is what their labels would have in common: model, dataset and configuration.

    Raises:
        RunError: a run recorded no loss, or its configuration cannot be read.
    """
    singles = [_single(folder) for folder in folders]
    baselines = {(run.setting, run.seed): run for run in singles if run.is_baseline}
    together: dict[tuple, list[_Single]] = {}
    seen: Counter[tuple] = Counter()
    for run in singles:
        key = (run.mode, run.about, run.setting, run.types)
        # A run that is given twice is not a second seed.
        together.setdefault((*key, seen[*key, run.seed]), []).append(run)
        seen[*key, run.seed] += 1
    known = looks((runs[0].variant, dict(runs[0].types)) for runs in together.values())
    abouts = {run.about for run in singles}
    curves = [
        _curve(
            str(n),
            runs[0].mode if len(abouts) == 1 else f"{runs[0].mode}, {runs[0].about}",
            look,
            runs,
            [
                (run, base)
                for run in runs
                if not run.is_baseline and (base := baselines.get((run.setting, run.seed)))
            ],
        )
        for n, (runs, look) in enumerate(zip(together.values(), known, strict=True))
    ]
    return abouts.pop() if len(abouts) == 1 else "", curves


def _single(run: RunFolder) -> _Single:
    metrics = run.read_metrics()
    # A student that learns only from its teacher is only validated on its text.
    train, valid = (last_of_each_step(metrics.get(name, [])) for name in (TRAIN_LOSS, VALID_LOSS))
    if not train and not valid:
        raise RunError(f"{run.root} recorded no loss", expected=f"rows in {run.metrics.name}")
    config = RunConfig.read(run)
    quantization, experiment = parsed(run.quant_config, QuantToml), config.experiment
    types = dict.fromkeys(quantizing_libraries(run), UNNAMED) | config.quantization.library_types
    types |= quantization.asked
    changed = changed_quantization(run, config.quantization)
    names = f"{experiment.model_name} on {experiment.dataset.name}"
    flags = list(experiment.extra_flags)
    seed = flag_table(flags).get(SEED, "")
    setting = experiment.model_dump(mode="json", exclude={"extra_flags"})
    return _Single(
        mode=config.mode_label + changed,
        variant=config.quantization.name + changed,
        about=f"{names}, {experiment.training.name}, {experiment.dtype}",
        setting=json.dumps([setting, without_flag(flags, SEED)], sort_keys=True),
        seed=seed,
        types=tuple(sorted(types.items())),
        is_baseline=not quantization.schedule and set(types.values()) <= {NONE},
        train=train,
        valid=valid,
        vocabulary=parsed(run.result, Result).vocab_size if run.result.exists() else None,
    )
