"""Quant types that change during training: 'mxfp4 until 0.9, then bf16'.

A schedule depends only on the step, which a checkpoint stores. A resumed run therefore uses the
same types as an uninterrupted one.
"""

import re
from dataclasses import dataclass

from mqo.quant.formats import check_type

# An unquantized site computes in the model's dtype, so each of these names means 'none'.
_UNQUANTIZED = ("bf16", "fp16", "fp32")
_PHASE = re.compile(r"(\w+)(?:\s+until\s+(\d+(?:\.\d+)?))?")
FORM = "TYPE until N or a share such as 0.9, then TYPE"


@dataclass(frozen=True)
class Phase:
    """A quant type, and the step before which it ends: a number (int) or a share of all (float).

    If `until` is None, it lasts until the end of training.
    """

    quant_type: str
    until: int | float | None = None

    def ends(self, total: int | None) -> int | None:
        """Return the first step, from 0, after the phase, in a training of `total` steps.

        Raises:
            ValueError: the phase ends at a share, and the total is not known.
        """
        if not isinstance(self.until, float):
            return self.until
        if total is None:
            raise ValueError(
                f"a schedule ends {self.quant_type} at the share {self.until:g} of the training, "
                "but its number of steps is not known; valid: the number of the step"
            )
        return round(self.until * total)


Schedule = tuple[Phase, ...]


def parse_schedule(text: object, any_type: bool = False) -> Schedule:
    """Read a schedule: phases separated by commas, all but the last with an end.

    With `any_type` it may have unknown types.

    Raises:
        ValueError: the schedule is invalid, or its ends do not increase; the text gives the form.
    """
    if not isinstance(text, str):
        raise ValueError(f"invalid schedule {text!r}; valid: {FORM}")
    phases = [
        _phase(part.strip().removeprefix("then ").strip(), any_type) for part in text.split(",")
    ]
    ends = [phase.until for phase in phases[:-1] if phase.until is not None]
    if len(ends) < len(phases) - 1 or phases[-1].until is not None:
        raise ValueError(f"'{text}': all types but the last need an end; valid: {FORM}")
    if len({type(end) for end in ends}) > 1 or sorted(set(ends)) != ends:
        raise ValueError(f"'{text}': ends must increase, and be all steps or all shares")
    return tuple(phases)


def type_at(schedule: Schedule, step: int, total: int | None) -> str:
    """Return the type at `step` of `total`; raise what `Phase.ends` raises."""
    for phase in schedule:
        end = phase.ends(total)
        if end is None or step < end:
            return phase.quant_type
    raise AssertionError("a schedule's last phase has no end")


def _phase(text: str, any_type: bool) -> Phase:
    match = _PHASE.fullmatch(text)
    if match is None:
        raise ValueError(f"invalid phase '{text}' of a schedule; valid: {FORM}")
    name, end = match.groups()
    quant_type = "none" if name in _UNQUANTIZED else name
    if not any_type:
        check_type(quant_type)
    if end is None:
        return Phase(quant_type)
    until = float(end) if "." in end else int(end)
    if isinstance(until, float) and not 0 < until < 1:
        raise ValueError(f"'{text}': a share must be between 0 and 1; valid: {FORM}")
    return Phase(quant_type, until)
