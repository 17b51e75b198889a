"""What becomes of a value at a threshold."""

import math

import pytest
from mqo.matrix.tables import DTYPES, quant_types
from mqo.perf.verdicts import Quartiles, Tables, Threshold, exactly, judge, tables
from pydantic import ValidationError


@pytest.fixture
def bounds(monkeypatch):
    """Two thresholds of our own in the place of the file's."""
    made = {"small": Threshold(most=2, unit="x", reason="why 2")}
    made |= {"large": Threshold(least=10, unit="dB", reason="why 10")}
    made |= {"bit_equal": Threshold(most=0, reason="equal commands")}
    own = Tables(steps=50, thresholds=made, peaks={})
    monkeypatch.setattr("mqo.perf.verdicts.tables", lambda: own)


@pytest.mark.parametrize(
    ("name", "value", "outcome"),
    [
        ("small", 2.0, "pass"),
        ("small", 2.01, "fail"),
        ("large", 10.0, "pass"),
        ("large", 9.99, "fail"),
        ("large", math.inf, "pass"),
        ("small", math.nan, "fail"),
        ("large", math.nan, "fail"),
    ],
)
def test_a_value_is_judged_by_its_bound(bounds, name, value, outcome):
    found = judge("a thing", value, name)
    assert (found.outcome, found.why) == (outcome, "why 2" if name == "small" else "why 10")


def test_what_was_not_measured_is_not_judged_and_has_no_value(bounds):
    found = judge("a thing", None, "small", "there is one core")
    assert (found.outcome, found.value, found.why) == ("not judged", None, "there is one core")
    assert judge("a thing", None, "small").why == "not measured"


def test_a_value_that_cannot_be_judged_is_still_shown(bounds):
    found = judge("a thing", 1.0, "small", "8 steps of 50")
    assert (found.outcome, found.value) == ("not judged", 1.0)


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [(1.0, 1.9, "pass"), (2.1, 3.0, "fail"), (1.9, 2.1, "not judged"), (None, None, "not judged")],
)
def test_noise_on_both_sides_of_the_bound_is_not_judged(bounds, low, high, outcome):
    middle = 2.0 if low is None else (low + high) / 2
    assert judge("a ratio", Quartiles(middle, low, high), "small").outcome == outcome


def test_bits_are_equal_or_not(bounds):
    assert exactly("losses", "").outcome == "pass"
    other = exactly("losses", "differs at step 3")
    assert (other.outcome, other.why) == ("fail", "differs at step 3")
    assert exactly("weights", "", "nothing was saved").outcome == "not judged"


def test_a_threshold_has_one_bound_and_a_reason():
    for wrong in ({"reason": "r"}, {"most": 1, "least": 0, "reason": "r"}, {"most": 1}):
        with pytest.raises(ValidationError):
            Threshold(**wrong)


def test_the_file_has_a_threshold_for_all_that_is_judged():
    assert judge("a type without one", 1.0, "sqnr_int3").outcome == "not judged"
    names = {f"sqnr_{kind}" for kind in quant_types()} | {f"product_{kind}" for kind in DTYPES}
    names |= {f"{what}_{kind}" for what in ("step", "memory") for kind in ("cpu", "gpu")}
    names |= {"loss", "bit_equal", "unlabeled", "efficiency"}
    assert set(tables().thresholds) == names
    assert all(len(one.reason) > 20 for one in tables().thresholds.values())
    assert all(name.startswith("NVIDIA ") for name in tables().peaks)
