"""Groups, gaps and verdicts of made-up runs whose answers are known."""

import math

import pytest
from mqo.report import compare as rules
from mqo.report.collect import collect
from mqo.report.compare import compare

from .conftest import falling


def groups(runs):
    return compare(collect([runs.root])[0])[0]


def only(runs):
    (group,) = groups(runs)
    return group


def row(group, variant):
    return next(row for row in group.rows if row.variant == variant)


def trio(runs, seed, base, **gaps):
    """bf16 at `base`, and modes at their gaps from it."""
    runs(f"bf16 {seed}", seed=seed, loss=base)
    for mode, gap in gaps.items():
        runs(f"{mode} {seed}", mode, seed=seed, loss=base * (1 + gap))


# -- which runs are compared ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"steps": 100},
        {"flags": ("--lr", "0.5")},
        {"digest": "11ee"},
        {"model": "llama31-8b"},
    ],
)
def test_what_cannot_be_compared_is_apart(runs, other):
    runs("one")
    runs("two", "mxfp4", **other)
    assert [len(group.runs) for group in groups(runs)] == [1, 1]


def test_groups_of_one_title_say_what_tells_them_apart(runs):
    runs("one")
    runs("two", flags=("--lr", "0.5"))
    assert sorted(group.differs for group in groups(runs)) == [("--lr 0.002",), ("--lr 0.5",)]


def test_places_and_seeds_are_compared(runs):
    runs("one")
    runs("elsewhere/two", "mxfp4", flags=("--save", "/some/where"))
    runs("three", seed=2)
    assert len(only(runs).runs) == 3


def test_what_is_recomputed_may_differ(runs):
    """A mode with a PV type may have to, and the numbers are the same."""
    runs("one")
    core = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
    runs("two", "mxfp4", flags=core)
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    runs("three", "mxfp8", flags=(*full, "--recompute-num-layers", "1"))
    assert len(only(runs).runs) == 3


def test_a_repeated_run_is_left_out_and_said(runs):
    runs("a", loss=6.0)
    runs("b", loss=6.0)
    runs("c", "mxfp4", loss=6.1)
    runs("d", "mxfp4", loss=6.2)
    (group,), repeated = compare(collect([runs.root])[0])
    assert [run.name for run in group.runs] == ["b", "d"]
    assert [one.name for one in repeated] == ["a", "c"]
    assert "same to the last bit" in repeated[0].reason
    assert "losses differ" in repeated[1].reason


def test_other_machines_and_releases_are_a_caution(runs):
    runs("one")
    runs("two", "mxfp4", cpu="Another CPU")
    assert only(runs).cautions == ("2 machines",)


def test_another_norm_or_optimizer_is_named(runs):
    runs("one")
    runs("two", "mxfp4", implementation={"norms": ["torch.RMSNorm"], "optimizers": ["apex.Adam"]})
    runs("of 0.1", "mxfp8", implementation=None)
    assert only(runs).cautions == ("different optimizers (apex.Adam; torch.AdamW)",)


# -- the numbers ---------------------------------------------------------------------------------


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
    steps, values = zip(*rules.difference(other, base), strict=True)
    assert steps == tuple(range(1, 201))
    assert values[0] == 0
    assert values[-1] == pytest.approx(0.5, abs=2e-3)  # e^-6 of the way is left


def test_rows_go_from_bf16_to_what_quantizes_most(runs):
    for mode in ("mxfp4", "bf16", "FA_linear_mxfp8", "FA_mxfp8"):
        runs(mode, mode)
    names = [row.variant for row in only(runs).rows]
    assert names == ["bf16", "FA_mxfp8", "FA_linear_mxfp8", "mxfp4"]


# -- the verdict ---------------------------------------------------------------------------------


def test_the_largest_share_within_the_spread_of_seeds_is_taken(runs):
    """bf16's losses 5.98, 6.00, 6.02 have a deviation of 0.02: T is 2 * 0.02 / 6."""
    for seed, base in enumerate((5.98, 6.0, 6.02)):
        trio(runs, seed, base, FA_mxfp8=0.001, FA_linear_mxfp8=0.004, mxfp4=0.05)
    found = only(runs).verdict
    assert found.tolerance == pytest.approx(0.04 / 6)
    assert found.choice == "FA_linear_mxfp8"
    assert found.doubts == ()
    assert "+0.40%" in found.reasons[0]
    assert "33.0% of the FLOPs" in found.reasons[0]
    assert "mxfp4 would quantize 35.0%, but its gap is +5.00%" in found.reasons[1]


def test_of_equal_shares_the_nearer_one_is_taken(runs):
    for seed, base in enumerate((5.9, 6.0)):
        trio(runs, seed, base, linear_mxfp8=0.002, linear_hifp8=0.001)
    found = only(runs).verdict
    assert found.choice == "linear_hifp8"
    assert "As much: linear_mxfp8 (+0.20%)." in found.reasons


def test_of_one_seed_t_is_the_default_and_the_evidence_too_little(runs):
    trio(runs, 1, 6.0, FA_mxfp8=0.004, mxfp4=0.006)
    found = only(runs).verdict
    assert (found.choice, found.tolerance) == ("FA_mxfp8", rules.DEFAULT_TOLERANCE)
    assert found.doubts == ("One seed for every mode: chance alone may make such a difference.",)


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
    assert doubt.startswith("Too short: the unquantized training loss fell by 5.0% only")


def test_seeds_on_both_sides_of_t_are_said(runs):
    for seed, (base, gap) in enumerate(((5.98, 0.001), (6.0, 0.009), (6.02, 0.001))):
        trio(runs, seed, base, mxfp4=gap)
    found = only(runs).verdict
    assert found.choice == "mxfp4"
    assert found.doubts == ("Within T by one seed and beyond it by another: mxfp4.",)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_mode_that_diverged_is_never_taken(runs, loss):
    for seed, base in enumerate((5.9, 6.0)):
        trio(runs, seed, base, FA_mxfp8=0.0)
        runs(f"mxfp4 {seed}", "mxfp4", seed=seed, loss=loss)
    found = only(runs).verdict
    assert found.choice == "FA_mxfp8"
    assert "its gap is not finite" in found.reasons[1]


def test_without_bf16_or_without_another_mode_nothing_is_chosen(runs):
    runs("one", "mxfp4")
    assert only(runs).verdict.choice is None
    assert "no unquantized run" in only(runs).verdict.doubts[0]


def test_bf16_alone_chooses_nothing(runs):
    runs("one")
    assert only(runs).verdict.choice is None
