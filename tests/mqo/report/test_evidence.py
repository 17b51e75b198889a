"""Intervals and corrections against published numbers, and against their definitions."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.errors import SetupError
from mqo.report.evidence import LEVEL, evidence, holm
from scipy import stats

# Student's own example: extra hours of sleep by one drug and by another, of ten patients (1908).
SLEEP = (1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4)
several = st.lists(st.floats(-1, 1), min_size=2, max_size=9)


def test_students_own_example():
    (found,) = evidence([SLEEP])
    assert found.mean == pytest.approx(1.58)
    assert (found.low, found.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    assert found.p == found.adjusted == pytest.approx(0.00283, abs=1e-5)
    assert found.seen
    # Positive and skewed: resampling moves both ends up.
    assert found.low < found.bootstrap[0] < found.mean < found.high < found.bootstrap[1] + 1


def test_p_values_of_holms_paper_are_corrected_in_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(several)
def test_the_interval_holds_the_mean_and_excludes_zero_where_p_says_so(values):
    (found,) = evidence([values])
    assert found.low <= found.mean <= found.high
    if abs(found.p - (1 - LEVEL)) > 1e-6:
        assert (found.low <= 0 <= found.high) == (found.p > 1 - LEVEL)


def test_the_smallest_gap_is_seen_four_times_in_five():
    """By simulation: gaps of that mean, as far apart as those it was computed from."""
    (found,) = evidence([(0.1, -0.1, 0.05, -0.05, 0.0)])
    deviation = np.std(found.values, ddof=1)
    draws = np.random.default_rng(1).normal(found.smallest, deviation, (4000, len(found.values)))
    seen = stats.ttest_1samp(draws, 0, axis=1).pvalue < 1 - LEVEL
    # The formula takes the t distribution for that of a mean which is not zero: a little off.
    assert 0.75 < seen.mean() < 0.87


def test_one_seed_is_no_evidence():
    (found,) = evidence([[0.1]])
    assert (found.mean, found.low, found.p, found.seen) == (0.1, None, None, None)
    assert evidence([None, []]) == [None, None]
    assert evidence([[math.nan, 0.1]])[0].seen is None


def test_without_scipy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(SetupError, match=r"scipy is missing.*\[report\]"):
        evidence([SLEEP])


def test_equal_gaps():
    same, none = evidence([[0.5, 0.5], [0.0, 0.0]])
    assert (same.low, same.high, same.p, same.bootstrap) == (0.5, 0.5, 0.0, None)
    assert (none.p, none.seen) == (1.0, False)


def test_several_comparisons_are_corrected_for():
    alone = evidence([SLEEP])[0]
    among = evidence([SLEEP, [0.1, -0.1, 0.2], None, [3.0, 3.1, 2.9]])
    assert among[0].p == alone.p
    assert among[0].adjusted == pytest.approx(2 * alone.p)
    assert [one and one.seen for one in among] == [True, False, None, True]
