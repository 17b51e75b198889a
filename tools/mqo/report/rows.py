"""The rows of a comparison: a variant's values over seeds, and its gap to the baseline."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mqo.launch.libraries import library_labels
from mqo.matrix.tables import NONE, SITES
from mqo.matrix.tables import UNQUANTIZED as BASELINE
from mqo.report.collect import Run
from mqo.report.evidence import Evidence, Spread, evidence

# A run's final training loss is the mean of this last share of its losses.
TAIL = 0.1
# Values of a row that are relative to the baseline of the same seed.
PAIRED = ("gap", "memory_saved", "speed_up")


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seeds, and their values over seeds.

    `pairs` has the runs that have a baseline of the same seed, with it. `gap` is relative to that
    (0.01: one percent more loss); `memory_saved` and `speed_up` likewise, for runs on the same
    machine: 0.1 is a tenth less memory, a tenth more tokens per second.
    """

    runs: tuple[Run, ...]
    pairs: tuple[tuple[Run, Run], ...]
    loss: Spread
    gap: Evidence | None
    tokens_per_s: Spread | None
    step_time: Spread | None
    peak_memory: Spread | None
    memory_saved: Evidence | None
    speed_up: Evidence | None

    @property
    def variant(self) -> str:
        """Return the mode with the user's changes to the quantization."""
        return self.runs[0].variant

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
        """Return the quantized part of the FLOPs; it does not depend on the seed."""
        return self.runs[0].share


def final_loss(run: Run, validated: bool) -> float:
    """Return the last validation loss, or the mean of the last tenth of the training losses."""
    series = run.valid[-1:] if validated else run.train[-max(1, int(TAIL * len(run.train))) :]
    return statistics.fmean(value for _, value in series)


def named_variant(name: str, variants: Iterable[str]) -> list[str]:
    """Return the variant of that name, or else those of which it is the mode.

    The version of a format, or its GEMMs, may follow a mode in the name of a variant.
    """
    known = list(dict.fromkeys(variants))
    if name in known or name == BASELINE:  # a library may quantize in that mode
        return [name] if name in known else []
    return [variant for variant in known if re.split(r"[ ,]", variant)[0] == name]


def rows_of(sides: Iterable[Sequence[Run]], baseline: Sequence[Run], validated: bool) -> list[Row]:
    """Return a row for each side: runs that differ only in their seeds.

    `baseline` is the side that the others are compared with; it is empty if there is none.
    """
    sides, bases = [tuple(side) for side in sides], {run.seed: run for run in baseline}
    pairs = [
        tuple((run, base) for run in side if (base := bases.get(run.seed)) and base is not run)
        for side in sides
    ]
    columns = [
        evidence(values) for values in zip(*(_paired(p, validated) for p in pairs), strict=True)
    ]
    return [
        Row(
            runs=side,
            pairs=pair,
            loss=Spread.over(final_loss(run, validated) for run in side),  # type: ignore[arg-type]
            tokens_per_s=Spread.over(run.tokens_per_s for run in side),
            step_time=Spread.over(run.step_time for run in side),
            peak_memory=Spread.over(run.peak_memory for run in side),
            **dict(zip(PAIRED, of_side, strict=True)),
        )
        for side, pair, *of_side in zip(sides, pairs, *columns, strict=True)
    ]


def _paired(pairs: Sequence[tuple[Run, Run]], validated: bool) -> tuple[list[float], ...]:
    """Return a side's values of PAIRED, each over seeds."""
    near = [(run, base) for run, base in pairs if run.machine == base.machine]
    memory = [(run.peak_memory, base.peak_memory) for run, base in near]
    speed = [(run.tokens_per_s, base.tokens_per_s) for run, base in near]
    return (
        [final_loss(run, validated) / final_loss(base, validated) - 1 for run, base in pairs],
        [1 - own / other for own, other in memory if own and other],
        [own / other - 1 for own, other in speed if own and other],
    )


def gap_of(row: Row) -> float:
    """Return the mean gap; NaN if there is none."""
    return row.gap.mean if row.gap else math.nan


def quantized(types: Mapping[str, str], differing: Sequence[str] = ()) -> str:
    """Return the types, and the sites of each: 'mxfp8: fprop qk'; then those of libraries.

    `differing` lists how operands are quantized at sites whose layers differ.
    """
    sites: dict[str, list[str]] = {}
    for site in SITES:
        if types.get(site, NONE) != NONE:
            sites.setdefault(types[site], []).append(site)
    named = [f"{kind}: {' '.join(names)}" for kind, names in sites.items()]
    return "; ".join((*named, *library_labels(types), *differing)) or "nothing"
