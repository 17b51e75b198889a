"""The thresholds of thresholds.toml and of formats, and what becomes of a measured value at one."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from mqo.quant import formats

FILE = Path(__file__).with_name("thresholds.toml")
Outcome = Literal["pass", "fail", "not judged"]


class Threshold(BaseModel):
    """The least or the most that a value may be, in `unit`, and why just that."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    least: float | None = None
    most: float | None = None
    unit: str = ""
    reason: str

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.least is None) == (self.most is None):
            raise ValueError("either least or most must be given")
        return self

    @property
    def line(self) -> str:
        """Return it in words: 'at least 25 dB'."""
        word, bound = ("at most", self.most) if self.least is None else ("at least", self.least)
        return f"{word} {bound:g} {self.unit}".rstrip()

    def holds(self, value: float) -> bool:
        """Return whether the value is within; NaN is not."""
        return value <= self.most if self.most is not None else value >= (self.least or 0)


class Tables(BaseModel):
    """thresholds.toml. `peaks` are dense TFLOP/s by a device's name and a dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int
    thresholds: Mapping[str, Threshold]
    peaks: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Verdict:
    """What was judged, the value, and the bound in words; `why` says the reason of either.

    A value that is None was not measured.
    """

    what: str
    outcome: Outcome
    value: float | None
    bound: str
    why: str


@dataclass(frozen=True)
class Noisy:
    """A median with its quartiles, which are None with too few values."""

    median: float
    low: float | None
    high: float | None


@functools.cache
def tables(file: Path = FILE) -> Tables:
    """Return all of the file, and the formats' own thresholds as sqnr_FORMAT."""
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    read["thresholds"] |= {
        f"sqnr_{name}": {"least": row.least_sqnr, "unit": "dB", "reason": row.sqnr_reason}
        for name, row in formats.FORMATS.items()
        if row.least_sqnr is not None
    }
    return Tables.model_validate(read)


def judge(what: str, value: float | Noisy | None, name: str, unless: str = "") -> Verdict:
    """Return the verdict by the threshold `name`.

    There is no verdict if `unless` gives a reason, or if the quartiles are on both sides of the
    bound.
    """
    middle = value.median if isinstance(value, Noisy) else value
    bound = tables().thresholds.get(name)
    if bound is None:
        return Verdict(what, "not judged", middle, "no threshold", unless or f"{name} has none")
    if unless or middle is None:
        return Verdict(what, "not judged", middle, bound.line, unless or "not measured")
    if isinstance(value, Noisy):
        if value.low is None or value.high is None:
            few = "too few values to tell it from noise"
            return Verdict(what, "not judged", middle, bound.line, few)
        if bound.holds(value.low) != bound.holds(value.high):
            noise = f"noise: its quartiles are {value.low:.3g} and {value.high:.3g}"
            return Verdict(what, "not judged", middle, bound.line, noise)
    outcome: Outcome = "pass" if bound.holds(middle) else "fail"
    return Verdict(what, outcome, middle, bound.line, bound.reason)


def exactly(what: str, difference: str, unless: str = "") -> Verdict:
    """Return the verdict on values that must be bit-equal; `difference` is empty if they are."""
    bound = tables().thresholds["bit_equal"]
    if unless:
        return Verdict(what, "not judged", None, bound.line, unless)
    outcome: Outcome = "fail" if difference else "pass"
    value = 1.0 if difference else 0.0
    return Verdict(what, outcome, value, bound.line, difference or bound.reason)
