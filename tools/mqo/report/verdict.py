"""Which variant to take, and whether the evidence is enough to say so."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mqo.report.rows import BASELINE, Row, final_loss, gap_of

# The rule's numbers; the page states them.
DEFAULT_TOLERANCE = 0.005
MIN_STEPS = 100
MIN_FALL = 0.1


@dataclass(frozen=True)
class Verdict:
    """Which variant the rule names, and the reasons. `doubts` are why the evidence may not do.

    `tolerance` is the T of the rule, relative to the baseline's loss.
    """

    choice: str | None
    tolerance: float
    reasons: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def verdict(rows: Sequence[Row], tolerance: float, *, continued: bool) -> Verdict:
    """Choose, of the variants within T of the baseline, the one that quantizes most.

    Gaps are paired by seed. The evidence is enough where the interval of the choice ends within T,
    and those of what quantizes more begin beyond it. `continued` runs began from a checkpoint and
    need no fall of the loss.
    """
    base = next((row for row in rows if row.variant == BASELINE), None)
    others = [row for row in rows if row.gap and row.share is not None]
    if base is None:
        text = "There is no unquantized run (mode bf16) here."
        return Verdict(None, tolerance, doubts=(text,))
    if not others:
        text = "No other mode has a known share and an unquantized run of the same seed."
        return Verdict(None, tolerance, doubts=(text,))
    within = [row for row in others if gap_of(row) <= tolerance]
    best = min(within, key=lambda row: (-(row.share or 0), gap_of(row)), default=None)
    doubts = (*_short(base, continued), *_unsure(best, others, tolerance))
    if best is None:
        nearest = _nearest(others)
        text = f"The gap of the nearest, {nearest.label}, is {_shown(nearest)}."
        return Verdict(BASELINE, tolerance, ("No mode stays within T.", text), doubts)
    reasons = [
        f"Its loss is {gap_of(best):+.2%} from the unquantized run's, and it quantizes "
        f"{best.share:.1%} of the FLOPs, the most of the modes within T.",
        *_equals(best, within),
        *_next(best, others),
    ]
    return Verdict(best.variant, tolerance, tuple(reasons), doubts)


def _nearest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: gap_of(row) if math.isfinite(gap_of(row)) else math.inf)


def _shown(row: Row) -> str:
    return f"{gap_of(row):+.2%}" if math.isfinite(gap_of(row)) else "not finite"


def _equals(best: Row, within: Sequence[Row]) -> list[str]:
    """Return what quantizes as much, and is a little farther away."""
    rows = [row for row in within if row.share == best.share and row is not best]
    parts = [f"{row.label} ({_shown(row)})" for row in rows]
    return [f"As much: {', '.join(parts)}."] if parts else []


def _next(best: Row, others: Sequence[Row]) -> list[str]:
    """Return what quantizes more, and is too far away."""
    more = [row for row in others if (row.share or 0) > (best.share or 0) and row is not best]
    if not more:
        return []
    near = _nearest(more)
    return [f"{near.label} would quantize {near.share:.1%}, but its gap is {_shown(near)}."]


# -- doubts ----------------------------------------------------------------------------------------


def _short(base: Row, continued: bool) -> Iterable[str]:
    """Yield what is too little of a training, a sentence each."""
    steps = base.runs[0].steps
    if steps < MIN_STEPS:
        yield f"Too few steps: {steps}, where {MIN_STEPS} are the least that this page goes by."
    falls = [1 - final_loss(run, False) / run.train[0][1] for run in base.runs]
    if not continued and not min(falls) >= MIN_FALL:
        yield (
            f"Too short: the unquantized training loss fell by {min(falls):.1%} only, "
            f"less than {MIN_FALL:.0%}."
        )


def _unsure(best: Row | None, others: Sequence[Row], tolerance: float) -> Iterable[str]:
    """Yield one sentence per gap that may be on the other side of T."""
    share = best.share or 0 if best else -1
    rivals = [row for row in others if (row.share or 0) > share and math.isfinite(gap_of(row))]
    judged = [*([best] if best else []), *rivals]
    single = [row for row in judged if _interval(row) is None]
    if single:
        which = "every mode" if len(single) == len(others) else _listed(single)
        yield f"One seed for {which}: chance alone may make such a difference."
    known = [(row, _interval(row)) for row in judged]
    if best and (own := _interval(best)) and own[1] > tolerance:
        yield (
            f"The gap of {best.label} may be beyond T: its interval reaches {own[1]:+.2%}. "
            "More seeds would tell."
        )
    rest = [row for row, ends in known if row is not best and ends and ends[0] <= tolerance]
    if rest:
        yield f"What quantizes more may be within T, by its interval: {_listed(rest)}."


def _interval(row: Row) -> tuple[float, float] | None:
    gap = row.evidence.get("gap")
    if gap is None or gap.low is None or gap.high is None:
        return None
    return gap.low, gap.high


def _listed(rows: Iterable[Row]) -> str:
    return ", ".join(row.label for row in rows)
