"""The curves of a comparison, or of some runs: one for all seeds of what is otherwise the same."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mqo.errors import RunError
from mqo.launch.config import Quantization
from mqo.launch.inputs import values
from mqo.matrix.tables import NONE, mode_label
from mqo.report.collect import changed_quantization
from mqo.report.colors import Look, Symbol, look, symbols
from mqo.report.compare import Group
from mqo.report.rows import BASELINE, difference
from mqo.report.series import DIFFERENCES, Band, band, less
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder, Series, last_of_each_step

MOST = 8  # in one picture; more are a tangle
SEED = "--seed"


@dataclass(frozen=True)
class Curve:
    """Losses over steps, in nats per token, of the runs that differ in their seeds alone.

    `difference` is the training loss less that of the unquantized run of the same seed. `chance` is
    ln(vocabulary size), where it is known.
    """

    name: str
    label: str
    look: Look
    symbol: Symbol
    loss: Band
    difference: Band
    valid: Band
    chance: float | None = None


def of_group(group: Group) -> list[Curve]:
    """Return a curve a variant, in the order of the group's rows."""
    shapes = symbols([look(row.types) for row in group.rows])
    made = []
    for row, shape in zip(group.rows, shapes, strict=True):
        pairs = [(run, group.baseline(run)) for run in row.runs]
        apart = [difference(run, base) for run, base in pairs if base and base is not run]
        made.append(
            Curve(
                name=row.variant,
                label=row.label,
                look=look(row.types),
                symbol=shape,
                loss=band([run.train for run in row.runs]),
                difference=band(apart, DIFFERENCES),
                valid=band([run.valid for run in row.runs]),
                chance=_chance(row.runs[0].vocabulary),
            )
        )
    return made


def first(group: Group) -> list[str]:
    """Return the variants that are shown at first, MOST at most.

    The baseline, the verdict's choice, and of each format in turn what quantizes most.
    """
    named = [name for name in (BASELINE, group.verdict.choice) if name]
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
    """A run as its folder has it, finished or not. `setting` is all but how it quantizes."""

    label: str
    setting: str
    seed: str
    types: tuple[tuple[str, str], ...]
    train: Series
    valid: Series
    chance: float | None

    @property
    def is_baseline(self) -> bool:
        return all(kind == NONE for _, kind in self.types)


def of_runs(folders: Iterable[RunFolder]) -> list[Curve]:
    """Return the curves of runs that may be unfinished; runs that differ in seed share one.

    Raises:
        RunError: a run recorded no loss, or has a configuration that cannot be read.
    """
    found = [_single(folder) for folder in folders]
    baselines = {(run.setting, run.seed): run for run in found if run.is_baseline}
    together: dict[tuple, list[_Single]] = {}
    seen: Counter[tuple] = Counter()
    for run in found:
        what = (run.label, run.setting, run.types)
        # A run that is given twice is no second seed.
        together.setdefault((*what, seen[*what, run.seed]), []).append(run)
        seen[*what, run.seed] += 1
    shapes = symbols([look(dict(runs[0].types)) for runs in together.values()])
    return [
        _curve(str(n), runs, shape, baselines)
        for n, (runs, shape) in enumerate(zip(together.values(), shapes, strict=True))
    ]


def _curve(
    name: str, runs: Sequence[_Single], shape: Symbol, baselines: dict[tuple[str, str], _Single]
) -> Curve:
    pairs = [(run, baselines.get((run.setting, run.seed))) for run in runs if not run.is_baseline]
    return Curve(
        name=name,
        label=runs[0].label,
        look=look(dict(runs[0].types)),
        symbol=shape,
        loss=band([run.train for run in runs]),
        difference=band([less(run.train, base.train) for run, base in pairs if base], DIFFERENCES),
        valid=band([run.valid for run in runs]),
        chance=runs[0].chance,
    )


def _single(run: RunFolder) -> _Single:
    metrics = run.read_metrics()
    # A student that learns from its teacher alone is only validated on its text.
    train, valid = (last_of_each_step(metrics.get(name, [])) for name in (TRAIN_LOSS, VALID_LOSS))
    if not train and not valid:
        raise RunError(f"{run.root} recorded no loss", expected=f"rows in {run.metrics.name}")
    config = run.read_config()
    asked = tomllib.loads(run.quant_config.read_text(encoding="utf-8")).get("asked", {})
    flags = list(config["experiment"].get("extra_flags", ()))
    seed = " ".join(values(flags, SEED))
    setting = {key: value for key, value in config["experiment"].items() if key != "extra_flags"}
    rest = [word for word in flags if word not in (SEED, seed)]
    return _Single(
        label=_label(run, config),
        setting=json.dumps([setting, rest], sort_keys=True),
        seed=seed,
        types=tuple(sorted(asked.items())),
        train=train,
        valid=valid,
        chance=_chance(_vocabulary(run)),
    )


def _label(run: RunFolder, config: dict[str, Any]) -> str:
    try:
        of, how = config["experiment"], Quantization.model_validate(config["quantization"])
    except ValueError as error:
        raise RunError(
            f"{run.config} does not say how its run quantized: {error}",
            expected="the configuration as this version of mqo, or an earlier one, writes it",
        ) from None
    mode = mode_label(how.name, of["dtype"], scheduled=bool(how.schedule))
    mode += changed_quantization(run, how)
    names = (of["model"]["name"], of["dataset"]["name"], mode)
    return f"{' '.join(names)}, {of['training']['name']}, {of['dtype']}"


def _vocabulary(run: RunFolder) -> int | None:
    if not run.result.exists():
        return None
    return json.loads(run.result.read_text(encoding="utf-8"))["vocab_size"]


def _chance(vocabulary: int | None) -> float | None:
    return math.log(vocabulary) if vocabulary else None
