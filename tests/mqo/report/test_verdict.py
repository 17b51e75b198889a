"""Verdicts on made-up runs whose answers are known."""

import math

import pytest
from mqo.report import verdict as rules
from mqo.report.collect import collect
from mqo.report.compare import compare

from .conftest import only, trio


def test_the_largest_share_within_t_is_taken(runs):
    """The losses of seeds are farther apart than T; the gaps, paired, are not."""
    for seed, base in enumerate((5.8, 6.0, 6.2)):
        trio(runs, seed, base, FA_mxfp8=0.001, FA_linear_mxfp8=0.004, mxfp4=0.01)
    found = only(runs).verdict
    assert found.choice == "FA_linear_mxfp8"
    assert found.doubts == ()
    assert "+0.40%" in found.reasons[0]
    assert "33.0% of the FLOPs" in found.reasons[0]
    assert "mxfp4 would quantize 35.0%, but its gap is +1.00%" in found.reasons[1]


def test_t_is_the_users(runs):
    for seed, base in enumerate((5.8, 6.0, 6.2)):
        trio(runs, seed, base, FA_mxfp8=0.001, mxfp4=0.01)
    (group,), _ = compare(collect([runs.root])[0], 0.02)
    assert (group.verdict.choice, group.verdict.tolerance) == ("mxfp4", 0.02)


def test_of_equal_shares_the_nearer_one_is_taken(runs):
    for seed, base in enumerate((5.9, 6.0)):
        trio(runs, seed, base, linear_mxfp8=0.002, linear_hifp8=0.001)
    found = only(runs).verdict
    assert found.choice == "linear_hifp8"
    assert "These quantize as much: linear_mxfp8 (+0.20%)." in found.reasons


def test_of_one_seed_t_is_the_default_and_the_evidence_too_little(runs):
    trio(runs, 1, 6.0, FA_mxfp8=0.004, mxfp4=0.006)
    found = only(runs).verdict
    assert (found.choice, found.tolerance) == ("FA_mxfp8", rules.DEFAULT_TOLERANCE)
    assert found.doubts == ("Only one seed for every mode: the difference may be due to chance.",)


def test_where_no_mode_is_near_bf16_stays(runs):
    for seed, base in enumerate((5.99, 6.0, 6.01)):
        trio(runs, seed, base, mxfp4=0.05)
    found = only(runs).verdict
    assert (found.choice, found.doubts) == ("bf16", ())
    assert "+5.00%" in found.reasons[1]


def test_too_few_steps_are_said(runs):
    for seed, base in enumerate((5.9, 6.0)):
        for mode, loss in (("bf16", base), ("mxfp4", base)):
            runs(f"{mode} {seed}", mode, seed=seed, loss=loss, steps=rules.MIN_STEPS - 1)
    (doubt,) = only(runs).verdict.doubts
    assert doubt.startswith("Too few steps: 99")


def test_a_loss_that_hardly_fell_is_said(runs):
    for seed, base in enumerate((7.5, 7.6)):
        trio(runs, seed, base, mxfp4=0.0)
    (doubt,) = only(runs).verdict.doubts
    assert doubt.startswith("Too short: the unquantized training loss fell by only 5.0%")


def seeds(runs, **gaps):
    """Three seeds of each mode, at these gaps."""
    for seed, base in enumerate((5.9, 6.0, 6.1)):
        trio(runs, seed, base, **{mode: values[seed] for mode, values in gaps.items()})


def test_a_choice_whose_interval_reaches_beyond_t_is_in_doubt(runs):
    seeds(runs, mxfp4=(0.001, 0.009, 0.001))
    found = only(runs).verdict
    assert found.choice == "mxfp4"
    (doubt,) = found.doubts
    assert doubt.startswith("The gap of mxfp4 may exceed T: its interval reaches +1.51%.")


def test_what_quantizes_more_and_may_be_within_t_is_in_doubt(runs):
    seeds(runs, FA_mxfp8=(0.001, 0.001, 0.001), mxfp4=(0.001, 0.011, 0.009))
    found = only(runs).verdict
    assert found.choice == "FA_mxfp8"
    assert found.doubts == (
        "These modes quantize more, and may be within T by their intervals: mxfp4.",
    )


def test_what_quantizes_less_than_the_choice_changes_nothing(runs):
    seeds(runs, FA_mxfp8=(0.0, 0.03, 0.0), mxfp4=(0.001, 0.001, 0.002))
    assert only(runs).verdict.doubts == ()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_mode_that_diverged_is_never_taken(runs, loss):
    for seed, base in enumerate((5.9, 6.0)):
        trio(runs, seed, base, FA_mxfp8=0.0)
        runs(f"mxfp4 {seed}", "mxfp4", seed=seed, loss=loss)
    found = only(runs).verdict
    assert found.choice == "FA_mxfp8"
    assert "its gap is not finite" in found.reasons[1]


@pytest.mark.parametrize(("mode", "doubts"), [("mxfp4", 1), ("bf16", 0)])
def test_without_bf16_or_without_another_mode_nothing_is_chosen(runs, mode, doubts):
    runs("one", mode)
    found = only(runs).verdict
    assert found.choice is None
    assert sum("no unquantized run" in doubt for doubt in found.doubts) == doubts
