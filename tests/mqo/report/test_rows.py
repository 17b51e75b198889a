"""Values of made-up runs whose answers are known."""

import math

import pytest
from mqo.report.series import less

from .conftest import falling, only, trio


def row(group, variant):
    return next(row for row in group.rows if row.variant == variant)


def test_a_gap_is_relative_to_bf16_of_the_same_seed(runs):
    trio(runs, 1, 6.0, mxfp4=0.02)
    trio(runs, 2, 7.0, mxfp4=0.04)
    gap = row(only(runs), "mxfp4").gap
    assert gap.values == pytest.approx((0.02, 0.04))
    assert gap.mean == pytest.approx(0.03)
    assert gap.deviation == pytest.approx(0.02 / math.sqrt(2))
    assert row(only(runs), "bf16").gap is None


def test_a_seed_without_bf16_has_no_gap(runs):
    runs("base", seed=1)
    runs("other", "mxfp4", seed=2)
    assert row(only(runs), "mxfp4").gap is None


def test_without_validation_everywhere_the_tail_of_training_counts(runs):
    runs("base", loss=6.0)
    folder = runs("other", "mxfp4", loss=6.6)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(line for line in lines if "validation" not in line))
    group = only(runs)
    assert not group.validated
    tail = falling(200, 6.0)[-20:]
    assert row(group, "bf16").loss.mean == pytest.approx(sum(tail) / 20)


def test_memory_and_speed_are_compared_on_one_machine(runs):
    runs("base", step_s=0.5, memory=1000)
    runs("near", "FA_mxfp8", step_s=1.0, memory=900)
    runs("far", "mxfp4", step_s=0.1, memory=10, cpu="Another CPU")
    group = only(runs)
    assert row(group, "FA_mxfp8").speed_up.mean == pytest.approx(-0.5)
    assert row(group, "FA_mxfp8").memory_saved.mean == pytest.approx(0.1)
    assert row(group, "mxfp4").speed_up is row(group, "mxfp4").memory_saved is None


def test_the_difference_is_taken_step_by_step(runs):
    runs("base", loss=6.0)
    runs("other", "mxfp4", loss=6.5)
    base, other = only(runs).runs
    steps, values = zip(*less(other.train, base.train), strict=True)
    assert steps == tuple(range(1, 201))
    assert values[0] == 0
    assert values[-1] == pytest.approx(0.5, abs=2e-3)  # e^-6 of the way is left


def test_rows_go_from_bf16_to_what_quantizes_most(runs):
    for mode in ("mxfp4", "bf16", "FA_linear_mxfp8", "FA_mxfp8"):
        runs(mode, mode)
    names = [row.variant for row in only(runs).rows]
    assert names == ["bf16", "FA_mxfp8", "FA_linear_mxfp8", "mxfp4"]
