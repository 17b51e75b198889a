"""Choose a variant by the rule, and check whether the evidence is sufficient."""

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
    """The variant that the rule chooses, and why. `doubts` tell why the evidence may not suffice.

    `tolerance` is the T of the rule, relative to the baseline's loss.
    """

    choice: str | None
    tolerance: float
    reasons: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def verdict(
    rows: Sequence[Row], tolerance: float, *, continued: bool, baseline: str = BASELINE
) -> Verdict:
    """Choose the variant that quantizes the most FLOPs among those with a mean gap of at most T.

    Gaps are paired by seed. The evidence suffices if the interval of the choice ends within T, and
    the intervals of variants that quantize more begin above T. `continued` runs began from a
    checkpoint, so their loss need not fall. With a quantized `baseline` there is no choice.
    """
    if baseline != BASELINE:
        text = "The rule chooses by gaps to unquantized runs, and this report has another baseline."
        return Verdict(None, tolerance, doubts=(text,))
    base = next((row for row in rows if row.variant == BASELINE), None)
    others = [row for row in rows if row.gap and row.share is not None]
    if base is None:
        text = "This comparison has no unquantized run (mode bf16)."
        return Verdict(None, tolerance, doubts=(text,))
    if not others:
        text = "No other mode has both a known share and an unquantized run of the same seed."
        return Verdict(None, tolerance, doubts=(text,))
    within = [row for row in others if gap_of(row) <= tolerance]
    best = min(within, key=lambda row: (-(row.share or 0), gap_of(row)), default=None)
    doubts = (*_short(base, continued), *_unsure(best, others, tolerance))
    if best is None:
        nearest = _nearest(others)
        text = f"The smallest gap is {_shown(nearest)}, of {nearest.label}."
        return Verdict(BASELINE, tolerance, ("No mode is within T.", text), doubts)
    reasons = [
        f"Its gap to the unquantized loss is {gap_of(best):+.2%}, and it quantizes "
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
    """Return the variants that quantize as much, with a larger gap."""
    rows = [row for row in within if row.share == best.share and row is not best]
    parts = [f"{row.label} ({_shown(row)})" for row in rows]
    return [f"These quantize as much: {', '.join(parts)}."] if parts else []


def _next(best: Row, others: Sequence[Row]) -> list[str]:
    """Return the nearest variant that quantizes more, with a gap above T."""
    more = [row for row in others if (row.share or 0) > (best.share or 0) and row is not best]
    if not more:
        return []
    near = _nearest(more)
    return [f"{near.label} would quantize {near.share:.1%}, but its gap is {_shown(near)}."]


# -- doubts ----------------------------------------------------------------------------------------


def _short(base: Row, continued: bool) -> Iterable[str]:
    """Yield one sentence per way in which the training is too short."""
    steps = base.runs[0].steps
    if steps < MIN_STEPS:
        yield f"Too few steps: {steps}. At least {MIN_STEPS} are needed."
    falls = [1 - final_loss(run, False) / run.train[0][1] for run in base.runs]
    if not continued and not min(falls) >= MIN_FALL:
        yield (
            f"Too short: the unquantized training loss fell by only {min(falls):.1%}. "
            f"At least {MIN_FALL:.0%} is needed."
        )


def _unsure(best: Row | None, others: Sequence[Row], tolerance: float) -> Iterable[str]:
    """Yield one sentence per gap that may be on the other side of T."""
    share = best.share or 0 if best else -1
    rivals = [row for row in others if (row.share or 0) > share and math.isfinite(gap_of(row))]
    judged = [*([best] if best else []), *rivals]
    single = [row for row in judged if _interval(row) is None]
    if single:
        which = "every mode" if len(single) == len(others) else _listed(single)
        yield f"Only one seed for {which}: the difference may be due to chance."
    known = [(row, _interval(row)) for row in judged]
    if best and (own := _interval(best)) and own[1] > tolerance:
        yield (
            f"The gap of {best.label} may exceed T: its interval reaches {own[1]:+.2%}. "
            "More seeds are needed."
        )
    rest = [row for row, ends in known if row is not best and ends and ends[0] <= tolerance]
    if rest:
        yield f"These modes quantize more, and may be within T by their intervals: {_listed(rest)}."


def _interval(row: Row) -> tuple[float, float] | None:
    if row.gap is None or row.gap.low is None or row.gap.high is None:
        return None
    return row.gap.low, row.gap.high


def _listed(rows: Iterable[Row]) -> str:
    return ", ".join(row.label for row in rows)
