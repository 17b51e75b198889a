"""Group the runs that may be compared."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mqo.errors import MqoError, UnknownNameError
from mqo.matrix.tables import NONE
from mqo.report.collect import LeftOut, Run
from mqo.report.rows import BASELINE, Row, gap_of, named_variant, rows_of
from mqo.report.verdict import DEFAULT_TOLERANCE, Verdict, verdict

MOST_SHOWN = 3  # differences in a subtitle
# Settings that another setting states more clearly: the samples, by the steps.
_INPUTS = "inputs"  # the digest of all files that are read: data, tokenizer, checkpoint
_IMPLIED = {"--train-samples": "steps", "--train-iters": "steps"}


@dataclass(frozen=True)
class Group:
    """Runs that may be compared. `validated`: final losses are validation losses.

    `differs` has the differences to groups with the same title, the clearest first.
    """

    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    validated: bool
    verdict: Verdict
    differs: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    baseline_variant: str = BASELINE

    @property
    def first(self) -> Run:
        """Return a run; all have the same model, dataset and configuration."""
        return self.runs[0]

    @property
    def reference(self) -> str:
        """Return the name of the baseline for texts: 'unquantized', or its label."""
        rows = (row for row in self.rows if row.variant == self.baseline_variant)
        label = next((row.label for row in rows), self.baseline_variant)
        return "unquantized" if self.baseline_variant == BASELINE else label

    @property
    def reference_run(self) -> str:
        """Return the run of the same seed that a run is compared with, in words."""
        is_usual = self.baseline_variant == BASELINE
        which = "unquantized run" if is_usual else f"run of {self.reference}"
        return f"the {which} of the same seed"

    @property
    def title(self) -> str:
        """Return model, dataset and configuration."""
        return f"{self.first.model} on {self.first.dataset}, {self.first.config}"

    @property
    def subtitle(self) -> str:
        """Return the first differences to groups with the same title; '' if there are none."""
        more = len(self.differs) - MOST_SHOWN
        return ", ".join(self.differs[:MOST_SHOWN]) + (f", and {more} more" if more > 0 else "")

    @property
    def full_title(self) -> str:
        """Return title and subtitle."""
        return f"{self.title}; {self.subtitle}" if self.subtitle else self.title

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
        known = [row for row in self.rows if row.gap]
        return sorted(known, key=lambda row: (sorted({*row.types.values()} - {NONE}), gap_of(row)))


def compare(
    runs: Sequence[Run], tolerance: float = DEFAULT_TOLERANCE, baseline: str = BASELINE
) -> tuple[list[Group], list[LeftOut]]:
    """Return the groups of comparable runs, and the runs that a later one replaces.

    `tolerance` is T in the rule of the verdict, relative: 0.01 is one percent more loss. `baseline`
    is a variant, or the mode of one.

    Raises:
        UnknownNameError: no run is of the baseline, unless that is the default.
        MqoError: several variants of a group are of that mode.
    """
    if baseline != BASELINE and not named_variant(baseline, (run.variant for run in runs)):
        known = sorted({run.variant for run in runs})
        raise UnknownNameError("baseline", baseline, [repr(name) for name in known])
    kinds: dict[tuple, list[Run]] = {}
    for run in runs:
        kinds.setdefault(run.kind, []).append(run)
    groups, replaced = [], []
    for key in sorted(kinds, key=lambda key: key[:3]):
        newest = {(run.variant, run.seed): run for run in kinds[key]}
        replaced += _replaced(kinds[key], newest)
        namesakes = [other for other in kinds if other[:3] == key[:3] and other != key]
        others = [kinds[other][0] for other in namesakes]
        groups.append(_group(tuple(newest.values()), others, tolerance, baseline))
    return groups, replaced


def _replaced(runs: Iterable[Run], newest: Mapping[tuple, Run]) -> list[LeftOut]:
    repeated = []
    for run in runs:
        later = newest[run.variant, run.seed]
        if later is not run:
            same = run.train == later.train and run.valid == later.valid
            words = "its losses are the same to the last bit" if same else "its losses differ"
            text = f"same configuration and seed as {later.name}, which is later; {words}"
            repeated.append(LeftOut(run.name, "repeated", text))
    return repeated


def _group(runs: tuple[Run, ...], others: Sequence[Run], tolerance: float, baseline: str) -> Group:
    validated = all(run.valid for run in runs)
    variants: dict[str, list[Run]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run)
    named = named_variant(baseline, variants)
    if len(named) > 1:
        raise MqoError(
            f"{len(named)} variants are of {baseline}",
            expected=f"one of {', '.join(map(repr, named))}",
        )
    variant = named[0] if named else baseline
    rows = rows_of(variants.values(), variants.get(variant, ()), validated)
    # The baseline is first, then the others by increasing quantized share.
    rows.sort(key=lambda row: (row.variant != variant, row.share or 0, row.variant))
    return Group(
        runs=runs,
        rows=tuple(rows),
        validated=validated,
        verdict=verdict(rows, tolerance, continued=runs[0].continued, baseline=variant),
        differs=tuple(_differs(runs[0], others)),
        cautions=tuple(cautions(runs)),
        baseline_variant=variant,
    )


def _differs(run: Run, others: Sequence[Run]) -> list[str]:
    """Return the differences to groups with the same title: data, steps, flags, inputs."""
    own, *rest = (_settings(member) for member in (run, *others))
    names = {name for table in (own, *rest) for name in table}
    apart = {name for name in names if any(table.get(name) != own.get(name) for table in rest)}
    apart -= {name for name, better in _IMPLIED.items() if better in apart}
    return [
        f"{name} {_shown(name, own, rest)}".rstrip() if name in own else f"no {name}"
        for name in sorted(apart, key=lambda name: (name == _INPUTS, name.startswith("--"), name))
    ]


def _settings(run: Run) -> dict[str, str]:
    own = {"data": run.data_file or "of the sample", "steps": str(run.steps)}
    return {**run.setting, **own, _INPUTS: run.setting["data"]}


def _shown(name: str, own: Mapping[str, str], rest: Sequence[Mapping[str, str]]) -> str:
    """Return a setting; for a path its last part, if no other group has the same one."""
    value, others = own[name], [table[name] for table in rest if name in table]
    short = PurePath(value).name if value.startswith("/") else value
    return value if short in (PurePath(other).name for other in others if other != value) else short


def cautions(runs: Sequence[Run]) -> list[str]:
    """Return the differences between runs that may change a loss."""
    facts: Mapping[str, Callable[[Run], object]] = {
        "commits": lambda run: run.commit,
        "releases of Megatron": lambda run: run.upstream,
        "releases of torch": lambda run: run.packages.get("torch"),
        "machines": lambda run: run.machine,
    }
    counts = {name: len({fact(run) for run in runs}) for name, fact in facts.items()}
    cautions = [f"{count} {name}" for name, count in counts.items() if count > 1]
    for kind in sorted({kind for run in runs for kind in run.implementation}):
        taken = sorted({run.implementation[kind] for run in runs if kind in run.implementation})
        cautions += [f"different {kind} ({'; '.join(taken)})"] if len(taken) > 1 else []
    return cautions
