"""Compare measured values with the thresholds of thresholds.toml and of formats."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from mqo.quant import formats

FILE = Path(__file__).with_name("thresholds.toml")
Outcome = Literal["pass", "fail", "not judged"]


class Threshold(BaseModel):
    """The least or the most allowed value, in `unit`, and its reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    least: float | None = None
    most: float | None = None
    unit: str = ""
    reason: str

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.least is None) == (self.most is None):
            raise ValueError("exactly one of least and most must be given")
        return self

    @property
    def line(self) -> str:
        """Return the bound as text, such as 'at least 25 dB'."""
        word, bound = ("at most", self.most) if self.least is None else ("at least", self.least)
        return f"{word} {bound:g} {self.unit}".rstrip()

    def holds(self, value: float) -> bool:
        """Return whether the value is within the bound; False for NaN."""
        return value <= self.most if self.most is not None else value >= (self.least or 0)


class Tables(BaseModel):
    """The content of thresholds.toml. `peaks` are dense TFLOP/s by device name and dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int
    thresholds: Mapping[str, Threshold]
    peaks: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Verdict:
    """The judged quantity, its value, the bound as text, and the reason.

    `value` is None if it was not measured. `why` explains the outcome, or why the bound has this
    value.
    """

    what: str
    outcome: Outcome
    value: float | None
    bound: str
    why: str


@dataclass(frozen=True)
class Quartiles:
    """A median with its quartiles, which are None for too few values."""

    median: float
    low: float | None
    high: float | None


@functools.cache
def tables(file: Path = FILE) -> Tables:
    """Return the content of the file, with the formats' thresholds as sqnr_FORMAT."""
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    read["thresholds"] |= {
        f"sqnr_{name}": {"least": row.least_sqnr, "unit": "dB", "reason": row.sqnr_reason}
        for name, row in formats.FORMATS.items()
        if row.least_sqnr is not None
    }
    return Tables.model_validate(read)


def judge(
    quantity: str, value: float | Quartiles | None, name: str, skip_reason: str = ""
) -> Verdict:
    """Return the verdict for the threshold `name` of thresholds.toml; `quantity` is its label.

    A value is not judged without a threshold, if it was not measured, if its quartiles are missing
    or on both sides of the bound, or if `skip_reason` is given.
    """
    middle = value.median if isinstance(value, Quartiles) else value
    bound = tables().thresholds.get(name)
    if bound is None:
        return Verdict(
            quantity, "not judged", middle, "no threshold", skip_reason or f"{name} has none"
        )
    if skip_reason or middle is None:
        return Verdict(quantity, "not judged", middle, bound.line, skip_reason or "not measured")
    if isinstance(value, Quartiles):
        if value.low is None or value.high is None:
            few = "too few values to separate it from noise"
            return Verdict(quantity, "not judged", middle, bound.line, few)
        if bound.holds(value.low) != bound.holds(value.high):
            noise = f"noise: the quartiles are {value.low:.3g} and {value.high:.3g}"
            return Verdict(quantity, "not judged", middle, bound.line, noise)
    outcome: Outcome = "pass" if bound.holds(middle) else "fail"
    return Verdict(quantity, outcome, middle, bound.line, bound.reason)


def exactly(quantity: str, difference: str, skip_reason: str = "") -> Verdict:
    """Return the verdict on values that must be bit-equal; `difference` is empty if they are."""
    value = None if skip_reason else float(bool(difference))
    verdict = judge(quantity, value, "bit_equal", skip_reason)
    return replace(verdict, why=difference) if difference else verdict
