"""Compare the losses of runs with those of a baseline, paired by seed, and list what differs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mqo.errors import MqoError, UnknownNameError
from mqo.launch.command import without_flag
from mqo.launch.config import RunConfig
from mqo.perf.ratio import quartiles
from mqo.perf.verdicts import Quartiles
from mqo.report.collect import Run, collect
from mqo.report.compare import cautions
from mqo.report.lines import MOST_OF_LABEL, gap_row, wrapped
from mqo.report.rows import BASELINE, TAIL, Row, final_loss, named_variant, rows_of
from mqo.runs import Value, flat

# Runs whose texts differ in these have losses that are not comparable.
_TEXT = ("dataset", "data", "steps", "tokens per step", "vocabulary")
_SEED = "--seed"
Differences = Mapping[str, tuple[Value | None, Value | None]]


@dataclass(frozen=True)
class Side:
    """Runs that differ only in the seed, compared with the baseline.

    `steps` is the gap of the training losses at the same steps of the same seed, over `pairs` of
    the last steps. `differs` has the baseline's value and this side's of each field of cell.json
    that differs; it is None for the baseline.
    """

    label: str
    row: Row
    steps: Quartiles | None = None
    pairs: int = 0
    differs: Differences | None = None
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The baseline first, then the other sides. `validated`: losses are validation losses."""

    sides: tuple[Side, ...]
    validated: bool
    left_out: tuple[str, ...]

    @property
    def baseline(self) -> Side:
        """Return the side that the others are compared with."""
        return self.sides[0]


def compare_losses(paths: Sequence[Path], baseline: str | None = None) -> Comparison:
    """Compare the runs at `paths`, which are runs or folders of them.

    The baseline is the side of that name or with a run of that name; by default the first run, or
    in a folder its unquantized runs.

    Raises:
        MqoError: fewer than two sides have a result, or no side has the baseline's name.
    """
    runs, left_out = collect(paths)
    notes = list(map(str, left_out))
    kinds: dict[tuple, dict[str, Run]] = {}
    for run in runs:
        seeds = kinds.setdefault((*run.kind, run.variant), {})
        if (earlier := seeds.get(run.seed)) is not None:
            same = "the same" if _losses(earlier) == _losses(run) else "not the same"
            words = f"repeated by {run.name}, whose losses are {same} to the last bit"
            notes.append(f"{earlier.name}: {words}")
        seeds[run.seed] = run
    sides = [tuple(seeds.values()) for seeds in kinds.values()]
    if len(sides) < 2:
        known = f"{len(sides)} way to train" if sides else "no run with a result"
        raise MqoError(
            f"There is {known} in {', '.join(map(str, paths))}"
            + "".join(f"; {note}" for note in notes),
            expected="runs that differ in more than the seed",
            help="`mqo runs` lists the runs",
        )
    labels = _labels(sides)
    base = _first(kinds, runs, paths[0]) if baseline is None else _named(sides, labels, baseline)
    validated = all(run.valid for side in sides for run in side)
    rows = rows_of(sides, sides[base], validated)
    others = [i for i in range(len(sides)) if i != base]
    compared = [_compared(labels[i], rows[i], sides[base][0]) for i in others]
    return Comparison((Side(labels[base], rows[base]), *compared), validated, tuple(notes))


def _losses(run: Run) -> tuple:
    return run.train, run.valid


def _labels(sides: Sequence[Sequence[Run]]) -> list[str]:
    """Return a name for each side: its mode's, with that of its first run if others share it."""
    names = [side[0].label for side in sides]
    return [
        f"{name} ({side[0].name})" if names.count(name) > 1 else name
        for name, side in zip(names, sides, strict=True)
    ]


def _first(kinds: Iterable[tuple], runs: Iterable[Run], path: Path) -> int:
    """Return the index of the kind at the first path, the unquantized one if there are several.

    `runs` are all: the first path's may have been repeated at another one.
    """
    root = path.resolve()
    below = {(*run.kind, run.variant) for run in runs if run.folder.root.is_relative_to(root)}
    # False sorts first.
    rank = [(kind[-1] != BASELINE, i) for i, kind in enumerate(kinds) if kind in below]
    return min(rank, default=(False, 0))[1]


def _named(sides: Sequence[Sequence[Run]], labels: Sequence[str], name: str) -> int:
    """Return the index of the side with that label, run or folder, or the only one of that mode."""
    path = str(Path(name).resolve())
    for i, side in enumerate(sides):
        folders = {str(run.folder.root) for run in side}
        if name in {labels[i], *(run.name for run in side)} | folders or path in folders:
            return i
    variants = named_variant(name, (side[0].variant for side in sides))
    matches = [i for i, side in enumerate(sides) if side[0].variant in variants]
    if len(matches) > 1:
        raise MqoError(
            f"{len(matches)} sides of the comparison are of {name}",
            expected=f"one of {', '.join(repr(labels[i]) for i in matches)}",
        )
    if matches:
        return matches[0]
    raise UnknownNameError("side of the comparison", name, [repr(label) for label in labels])


def _compared(label: str, row: Row, base: Run) -> Side:
    """Return a side; `base` is a run of the baseline, for a side without a seed in common."""
    steps = [gap for run, other in row.pairs for gap in _step_gaps(run, other)]
    run, other = row.pairs[0] if row.pairs else (row.runs[0], base)
    return Side(
        label,
        row,
        quartiles(steps) if steps else None,
        len(steps),
        differences(other, run),
        tuple(_cautions(other, run, bool(row.pairs))),
    )


def _step_gaps(run: Run, base: Run) -> list[float]:
    """Return the gaps of the training losses at the last tenth of the steps that both have."""
    other = dict(base.train)
    gaps = [value / other[step] - 1 for step, value in run.train if step in other]
    return [gap for gap in gaps[-max(1, int(TAIL * len(gaps))) :] if math.isfinite(gap)]


def differences(base: Run, run: Run) -> dict[str, tuple[Value | None, Value | None]]:
    """Return {field of a configuration: (its values in `base` and `run`)}, without seeds."""
    first, second = (_fields(each) for each in (base, run))
    return {
        name: (first.get(name), second.get(name))
        for name in first | second
        if first.get(name) != second.get(name)
    }


def _fields(run: Run) -> dict[str, Value]:
    config = RunConfig.read(run.folder).settings()
    words = without_flag(config["experiment"].get("extra_flags") or [], _SEED)
    return dict(flat(config | {"experiment": config["experiment"] | {"extra_flags": words}}))


def _cautions(base: Run, run: Run, paired: bool) -> Iterator[str]:
    texts = [
        (r.dataset, r.setting["data"], r.steps, r.tokens_per_step, r.vocabulary)
        for r in (base, run)
    ]
    unlike = [name for name, a, b in zip(_TEXT, *texts, strict=True) if a != b]
    if unlike:
        yield f"not trained on the same tokens: {', '.join(unlike)} differ"
    if not paired:
        yield "no seed in common with the baseline, so there is no gap"
    yield from cautions([base, run])


# -- output ----------------------------------------------------------------------------------------


def comparison_lines(result: Comparison) -> Iterator[str]:
    """Yield the comparison in lines of at most 80 columns."""
    base = result.baseline
    width = min(MOST_OF_LABEL, max(len(side.label) for side in result.sides))
    kind = "validation loss" if result.validated else "training loss, the mean of the last tenth"
    yield from wrapped(f"baseline: {base.label}; the loss is the final {kind}", "")
    yield f"  {'':{width}}  seeds    loss  gap to the baseline [95 % interval]"
    for side in result.sides:
        yield from _side_lines(side, width)
    for side in result.sides[1:]:
        yield from wrapped(f"{side.label} differs from the baseline in (cell.json):", "")
        for name, (was, now) in (side.differs or {}).items():
            yield from wrapped(f"{name}: {_value(was)} -> {_value(now)}")
        if not side.differs:
            yield "  nothing"
    for note in result.left_out:
        yield from wrapped(f"left out: {note}", "")


def _side_lines(side: Side, width: int) -> Iterator[str]:
    from mqo.report.page import shown

    gap = side.row.gap
    text = shown(gap) if side.differs is not None else ""
    yield from gap_row(side.label, width, len(side.row.runs), side.row.loss.mean, text)
    if side.differs is None:
        return
    indent = " " * 6
    if gap and gap.smallest is not None:
        seen = f"{'a' if gap.seen else 'no'} difference is seen{gap.correction}"
        words = f"{seen}; {len(gap.values)} seeds would detect a gap of {gap.smallest:.2%}"
        yield from wrapped(words, indent)
    elif gap and len(gap.values) == 1:
        yield from wrapped("one seed gives no interval: train at least three seeds", indent)
    elif gap:
        yield from wrapped("there is no interval, because a loss is not finite", indent)
    if side.steps:
        yield from wrapped(_steps_text(side.steps, side.pairs), indent)
    if side.cautions:
        yield from wrapped(f"caution: {'; '.join(side.cautions)}", indent)


def _steps_text(steps: Quartiles, pairs: int) -> str:
    from mqo.report.page import MINUS

    count = f"{pairs} pair{'s' * (pairs > 1)}"
    text = f"training loss at {count} of last steps: median {steps.median:+.2%}"
    if steps.low is not None and steps.high is not None:
        text += f", quartiles {steps.low:+.2%} to {steps.high:+.2%}"
    return text.replace("-", MINUS)


def _value(value: Value | None) -> str:
    return "nothing" if value is None else str(value)


def comparison_table(result: Comparison) -> dict[str, Any]:
    """Return the comparison for JSON."""
    return {
        "baseline": result.baseline.label,
        "loss": "validation" if result.validated else "training",
        "sides": [_side_table(side, result.validated) for side in result.sides],
        "left_out": result.left_out,
    }


def _side_table(side: Side, validated: bool) -> dict[str, Any]:
    runs = [
        {
            "name": run.name,
            "folder": str(run.folder.root),
            "seed": run.seed,
            "loss": final_loss(run, validated),
        }
        for run in side.row.runs
    ]
    gap = side.row.gap
    return {
        "label": side.label,
        "loss": side.row.loss.mean,
        "runs": runs,
        "gap": gap and asdict(gap) | {"seen": gap.seen},
        "steps": side.steps and asdict(side.steps) | {"pairs": side.pairs},
        "differs": side.differs,
        "cautions": side.cautions,
    }
