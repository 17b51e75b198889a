"""Groups runs that may be compared, and measures how far each mode is from the baseline."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from mqo.matrix.tables import NONE, SITES
from mqo.matrix.tables import UNQUANTIZED as BASELINE
from mqo.report.collect import LeftOut, Run
from mqo.report.evidence import Evidence, evidence
from mqo.runs import Series

# The verdict's numbers; the page states them.
DEFAULT_TOLERANCE = 0.005
SEED_FACTOR = 2
MIN_STEPS = 100
MIN_FALL = 0.1
# Of the training losses the mean of this share, the last ones, is a run's final loss.
TAIL = 0.1
# Values of a row that are relative to the baseline of the same seed.
PAIRED = ("gap", "memory_saved", "speed_up")


@dataclass(frozen=True)
class Spread:
    """Mean, and standard deviation (None of fewer than two), of a value over seeds."""

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """Return the spread of the values that are not None; None without any."""
        known = tuple(value for value in values if value is not None)
        if not known:
            return None
        finite = len(known) > 1 and all(map(math.isfinite, known))
        return cls(statistics.fmean(known), statistics.stdev(known) if finite else None, known)


@dataclass(frozen=True)
class Row:
    """A variant of a group: its runs' values over seeds.

    `gap` is relative to the baseline of the same seed (0.01: one percent more loss); `memory_saved`
    and `speed_up` likewise, of runs on the same machine: 0.1 is a tenth less memory, a tenth more
    tokens a second. `evidence` is what these three are of, by their names.
    """

    variant: str
    runs: tuple[Run, ...]
    loss: Spread
    gap: Spread | None
    tokens_per_s: Spread | None
    step_time: Spread | None
    peak_memory: Spread | None
    memory_saved: Spread | None
    speed_up: Spread | None
    evidence: Mapping[str, Evidence | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the variant as tables and plots show it."""
        return self.runs[0].label

    @property
    def types(self) -> Mapping[str, str]:
        """Return {site: quant type}."""
        return self.runs[0].types

    @property
    def share(self) -> float | None:
        """The quantized part of the FLOPs; it depends on no seed."""
        return self.runs[0].share


@dataclass(frozen=True)
class Verdict:
    """Which variant the rule names, whether the evidence is enough for it, and the reasons.

    `tolerance` is the T of the rule, relative to the baseline's loss.
    """

    choice: str | None
    tolerance: float
    basis: str
    reasons: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Runs that may be compared. `validated`: final losses are validation losses."""

    model: str
    dataset: str
    config: str
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    validated: bool
    verdict: Verdict
    differs: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Return model, dataset and configuration."""
        return f"{self.model} on {self.dataset}, {self.config}"

    @property
    def choice(self) -> str | None:
        """Return the verdict's choice as tables show it."""
        return next((row.label for row in self.rows if row.variant == self.verdict.choice), None)

    @property
    def seeds(self) -> tuple[str, ...]:
        """Return the seeds of all its runs."""
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    @property
    def machines(self) -> tuple[str, ...]:
        """Return the machines of its runs."""
        return tuple(dict.fromkeys(run.machine.line() for run in self.runs))

    @property
    def forest(self) -> list[Row]:
        """Return the variants that have a gap, as a forest plot lists them: by format, then gap."""
        known = [row for row in self.rows if row.evidence.get("gap")]
        return sorted(known, key=lambda row: (sorted({*row.types.values()} - {NONE}), _gap(row)))

    def baseline(self, run: Run) -> Run | None:
        """Return the unquantized run of the run's seed."""
        return _baselines(self.runs).get(run.seed)


def compare(runs: Sequence[Run]) -> tuple[list[Group], list[LeftOut]]:
    """The groups, by model, dataset and configuration, and the runs that a later one replaces."""
    kinds: dict[tuple, list[Run]] = {}
    for run in runs:
        key = (run.model, run.dataset, run.config, frozenset(run.setting.items()), run.steps)
        kinds.setdefault(key, []).append(run)
    made, replaced = [], []
    for key in sorted(kinds, key=lambda key: key[:3]):
        newest = {(run.variant, run.seed): run for run in kinds[key]}
        replaced += _replaced(kinds[key], newest)
        namesakes = [other for other in kinds if other[:3] == key[:3] and other != key]
        made.append(_group(tuple(newest.values()), [kinds[other][0] for other in namesakes]))
    return made, replaced


def _replaced(runs: Iterable[Run], newest: Mapping[tuple, Run]) -> list[LeftOut]:
    found = []
    for run in runs:
        later = newest[run.variant, run.seed]
        if later is not run:
            same = run.train == later.train and run.valid == later.valid
            words = "its losses are the same to the last bit" if same else "its losses differ"
            text = f"same configuration and seed as {later.name}, which comes later; {words}"
            found.append(LeftOut(run.name, "repeated", text))
    return found


def _group(runs: tuple[Run, ...], others: Sequence[Run]) -> Group:
    validated = all(run.valid for run in runs)
    rows = tuple(_rows(runs, validated))
    first = runs[0]
    return Group(
        model=first.model,
        dataset=first.dataset,
        config=first.config,
        runs=runs,
        rows=rows,
        validated=validated,
        verdict=verdict(rows, continued=first.continued),
        differs=tuple(_differs(first, others)),
        cautions=tuple(_cautions(runs)),
    )


def _differs(run: Run, others: Sequence[Run]) -> list[str]:
    """What tells the group from those of the same title."""
    own = run.setting | {"steps": str(run.steps)}
    rest = [other.setting | {"steps": str(other.steps)} for other in others]
    names = sorted({*own, *(name for other in rest for name in other)})
    return [
        f"{name} {own[name]}".rstrip() if name in own else f"no {name}"
        for name in names
        if any(other.get(name) != own.get(name) for other in rest)
    ]


def _cautions(runs: Sequence[Run]) -> list[str]:
    """Return the differences between runs that may change a loss."""
    facts: Mapping[str, Callable[[Run], object]] = {
        "commits": lambda run: run.commit,
        "releases of Megatron": lambda run: run.upstream,
        "releases of torch": lambda run: run.packages.get("torch"),
        "machines": lambda run: run.machine,
    }
    counts = {name: len({fact(run) for run in runs}) for name, fact in facts.items()}
    found = [f"{count} {name}" for name, count in counts.items() if count > 1]
    for kind in sorted({kind for run in runs for kind in run.implementation}):
        taken = sorted({run.implementation[kind] for run in runs if kind in run.implementation})
        found += [f"different {kind} ({'; '.join(taken)})"] if len(taken) > 1 else []
    return found


# -- rows ---------------------------------------------------------------------------------------


def final_loss(run: Run, validated: bool) -> float:
    """The last validation loss, or the mean of the last tenth of the training losses, in nats."""
    series = run.valid[-1:] if validated else run.train[-max(1, int(TAIL * len(run.train))) :]
    return statistics.fmean(value for _, value in series)


def difference(run: Run, baseline: Run) -> Series:
    """Return the training loss less the baseline's, in nats, at the steps that both have."""
    other = dict(baseline.train)
    return [(step, value - other[step]) for step, value in run.train if step in other]


def _baselines(runs: Iterable[Run]) -> dict[str, Run]:
    """Return {seed: the unquantized run}."""
    return {run.seed: run for run in runs if run.variant == BASELINE}


def _rows(runs: Sequence[Run], validated: bool) -> list[Row]:
    """Return the baseline first, then the others by the quantized share, least first."""
    variants: dict[str, list[Run]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run)
    baselines = _baselines(runs)
    rows = [_row(name, tuple(these), baselines, validated) for name, these in variants.items()]
    found = {name: evidence([_values(getattr(row, name)) for row in rows]) for name in PAIRED}
    rows = [
        replace(row, evidence={name: shown[i] for name, shown in found.items()})
        for i, row in enumerate(rows)
    ]
    return sorted(rows, key=lambda row: (row.variant != BASELINE, row.share or 0, row.variant))


def _values(spread: Spread | None) -> tuple[float, ...] | None:
    return spread.values if spread else None


def _row(variant: str, runs: tuple[Run, ...], baselines: Mapping[str, Run], validated: bool) -> Row:
    pairs = [(run, baselines[run.seed]) for run in runs if run.seed in baselines]
    near = [(run, base) for run, base in pairs if run.machine == base.machine]
    if variant == BASELINE:
        pairs = near = []
    return Row(
        variant=variant,
        runs=runs,
        loss=Spread.of(final_loss(run, validated) for run in runs),  # type: ignore[arg-type]
        gap=Spread.of(
            final_loss(run, validated) / final_loss(base, validated) - 1 for run, base in pairs
        ),
        tokens_per_s=Spread.of(run.tokens_per_s for run in runs),
        step_time=Spread.of(run.step_time for run in runs),
        peak_memory=Spread.of(run.peak_memory for run in runs),
        memory_saved=Spread.of(
            1 - run.peak_memory / base.peak_memory
            for run, base in near
            if run.peak_memory and base.peak_memory
        ),
        speed_up=Spread.of(
            run.tokens_per_s / base.tokens_per_s - 1
            for run, base in near
            if run.tokens_per_s and base.tokens_per_s
        ),
    )


# -- the verdict --------------------------------------------------------------------------------


def verdict(rows: Sequence[Row], *, continued: bool = False) -> Verdict:
    """Choose, of the variants within T of the baseline, the one that quantizes most.

    T is SEED_FACTOR standard deviations of the baseline's final loss over seeds, relative
    to its mean, or DEFAULT_TOLERANCE of a single seed. `continued` runs began from a checkpoint and
    need no fall of the loss.
    """
    base = next((row for row in rows if row.variant == BASELINE), None)
    others = [row for row in rows if row.gap and row.share is not None]
    if base is None:
        text = "There is no unquantized run (mode bf16) here."
        return Verdict(None, DEFAULT_TOLERANCE, "", doubts=(text,))
    tolerance, basis = _tolerance(base)
    if not others:
        text = "No other mode has a known share and an unquantized run of the same seed."
        return Verdict(None, tolerance, basis, doubts=(text,))
    within = [row for row in others if row.gap.mean <= tolerance]  # type: ignore[union-attr]
    doubts = tuple(_doubts(base, others, tolerance, continued))
    if not within:
        nearest = _nearest(others)
        text = f"The gap of the nearest, {nearest.label}, is {_shown(nearest)}."
        return Verdict(BASELINE, tolerance, basis, ("No mode stays within T.", text), doubts)
    best = min(within, key=lambda row: (-(row.share or 0), _gap(row)))
    reasons = [
        f"Its loss is {_gap(best):+.2%} from the unquantized run's, and it quantizes "
        f"{best.share:.1%} of the FLOPs, the most of the {len(within)} within T.",
        *_equals(best, within),
        *_next(best, others),
    ]
    return Verdict(best.variant, tolerance, basis, tuple(reasons), doubts)


def _gap(row: Row) -> float:
    return row.gap.mean if row.gap else math.nan


def _nearest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: _gap(row) if math.isfinite(_gap(row)) else math.inf)


def _shown(row: Row) -> str:
    return f"{_gap(row):+.2%}" if math.isfinite(_gap(row)) else "not finite"


def _equals(best: Row, within: Sequence[Row]) -> list[str]:
    """What quantizes as much, and is a little farther away."""
    rows = [row for row in within if row.share == best.share and row is not best]
    parts = [f"{row.label} ({_shown(row)})" for row in rows]
    return [f"As much: {', '.join(parts)}."] if parts else []


def _next(best: Row, others: Sequence[Row]) -> list[str]:
    """What quantizes more, and is too far away."""
    more = [row for row in others if (row.share or 0) > (best.share or 0) and row is not best]
    if not more:
        return []
    near = _nearest(more)
    return [f"{near.label} would quantize {near.share:.1%}, but its gap is {_shown(near)}."]


def _tolerance(base: Row) -> tuple[float, str]:
    if base.loss.deviation is None:
        return DEFAULT_TOLERANCE, "the default, for the unquantized mode has one seed"
    count = len(base.runs)
    relative = SEED_FACTOR * base.loss.deviation / base.loss.mean
    what = f"{SEED_FACTOR} standard deviations of the unquantized final loss"
    return relative, f"{what} over {count} seeds"


def _doubts(base: Row, others: Sequence[Row], tolerance: float, continued: bool) -> Iterable[str]:
    """Why the evidence may not separate the modes, a sentence each."""
    steps = base.runs[0].steps
    if steps < MIN_STEPS:
        yield f"Too few steps: {steps}, where {MIN_STEPS} are the least that this page goes by."
    falls = [1 - final_loss(run, False) / run.train[0][1] for run in base.runs]
    if not continued and not min(falls) >= MIN_FALL:
        yield (
            f"Too short: the unquantized training loss fell by {min(falls):.1%} only, "
            f"less than {MIN_FALL:.0%}."
        )
    single = [row for row in (base, *others) if len(row.runs) == 1]
    if single:
        which = "every mode" if len(single) == 1 + len(others) else _listed(single)
        yield f"One seed for {which}: chance alone may make such a difference."
    astride = [
        row for row in others if row.gap and min(row.gap.values) <= tolerance < max(row.gap.values)
    ]
    if astride:
        yield f"Within T by one seed and beyond it by another: {_listed(astride)}."


def _listed(rows: Iterable[Row]) -> str:
    return ", ".join(row.label for row in rows)


def quantized(types: Mapping[str, str]) -> str:
    """The types, and the sites of each: 'mxfp8: fprop qk'."""
    sites: dict[str, list[str]] = {}
    for site in SITES:
        if types.get(site, NONE) != NONE:
            sites.setdefault(types[site], []).append(site)
    return "; ".join(f"{kind}: {' '.join(of)}" for kind, of in sites.items()) or "nothing"
