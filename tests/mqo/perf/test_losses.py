"""Gaps of losses to a baseline: which runs are one side, their pairs, and what differs."""

import math

import pytest
from mqo.errors import MqoError, UnknownNameError
from mqo.perf.losses import compare_losses, comparison_lines, comparison_table

from ..report import conftest
from ..report.conftest import make_run, trio

runs = conftest.runs


@pytest.fixture
def three_seeds(runs):
    for seed, base in ((1, 6.0), (2, 6.2), (3, 5.8)):
        trio(runs, seed, base, mxfp4=0.02 + 0.001 * seed, FA_mxfp8=-0.0001)
    return runs


def gaps(result):
    return {side.label: side.row.gap and round(side.row.gap.mean, 6) for side in result.sides}


BF16 = "bf16 (unquantized)"


def test_seeds_are_one_side_and_a_folders_unquantized_runs_the_baseline(three_seeds):
    result = compare_losses([three_seeds.root])
    assert gaps(result) == {BF16: None, "FA_mxfp8": -0.0001, "mxfp4": 0.022}
    side = next(side for side in result.sides if side.label == "mxfp4")
    assert (
        side.row.gap.low < 0.022 < side.row.gap.high
        and side.row.gap.seen
        and side.row.gap.smallest > 0
    )
    assert side.pairs == 3 * 20 and side.steps.low <= side.steps.median <= side.steps.high
    assert side.differs["quantization.mode"] == ("bf16", "mxfp4")
    assert side.differs["quantization.types.pv"] == ("none", "mxfp4")
    assert "experiment.extra_flags" not in side.differs  # only the seed


def test_the_first_of_several_runs_is_the_baseline(three_seeds):
    root = three_seeds.root
    result = compare_losses([root / "mxfp4 1", root / "bf16 1", root / "FA_mxfp8 1"])
    assert result.baseline.label == "mxfp4"
    assert gaps(result)[BF16] == round(1 / 1.021 - 1, 6)
    assert result.sides[1].row.gap.low is None


def test_a_folders_unquantized_run_is_the_baseline_when_another_folder_repeats_it(runs):
    runs("old/bf16", loss=6.0)
    runs("old/linear_mxfp8", "linear_mxfp8", loss=6.1)
    runs("new/bf16", loss=6.0)
    result = compare_losses([runs.root / "old", runs.root / "new"])
    assert result.baseline.label == BF16


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4 2", "{root}/mxfp4 2"])
def test_a_baseline_has_a_modes_or_a_runs_name(three_seeds, name):
    named = name.format(root=three_seeds.root)
    assert compare_losses([three_seeds.root], named).baseline.label == "mxfp4"


def test_an_unknown_baseline_lists_the_sides(three_seeds):
    with pytest.raises(UnknownNameError, match="'FA_mxfp8', 'bf16"):
        compare_losses([three_seeds.root], "mxfp5")


def test_a_mode_that_several_sides_have_is_no_baseline(runs):
    runs("a", loss=6.0)
    runs("b", loss=6.3, flags=("--lr", "1e-4"))
    with pytest.raises(MqoError, match="2 sides"):
        compare_losses([runs.root], "bf16")


def test_a_loss_that_is_not_finite_gives_no_interval(three_seeds, runs):
    for seed, loss in ((1, 6.1), (2, 6.3), (3, math.inf)):
        runs(f"diverged {seed}", "FA_mxfp4", seed=seed, loss=loss)
    lines = [*comparison_lines(compare_losses([three_seeds.root]))]
    assert any("not finite" in line for line in lines)
    assert not any("one seed" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_runs_of_one_mode_with_other_flags_are_two_sides(runs):
    runs("a", loss=6.0)
    runs("b", loss=6.3, flags=("--lr", "1e-4"))
    first, second = compare_losses([runs.root / "a", runs.root / "b"]).sides
    assert (first.label, second.label) == (f"{BF16} (a)", f"{BF16} (b)")
    assert second.row.gap.mean == pytest.approx(0.05)
    assert list(second.differs) == ["experiment.extra_flags"]
    assert '"--lr"' in second.differs["experiment.extra_flags"][1]


def test_runs_on_other_tokens_have_a_caution(runs):
    runs("a", steps=200)
    runs("b", "mxfp4", steps=300, digest="01ff", seed=7)
    side = compare_losses([runs.root / "a", runs.root / "b"]).sides[1]
    assert side.row.gap is None
    said = "; ".join(side.cautions)
    assert "data, steps differ" in said and "no seed in common" in said


@pytest.mark.parametrize("seed", [1234, 5])
def test_one_way_to_train_is_refused(runs, seed):
    runs("a")
    runs("b", seed=seed)
    with pytest.raises(MqoError, match="1 way to train") as error:
        compare_losses([runs.root])
    assert ("a: repeated by b, whose losses are the same" in str(error.value)) == (seed == 1234)


def test_what_has_no_result_is_left_out_by_name(three_seeds):
    make_run(three_seeds.root / "late", "linear_mxfp8").result.unlink()
    result = compare_losses([three_seeds.root])
    assert len(result.sides) == 3
    assert [note.partition(":")[0] for note in result.left_out] == ["late"]


def test_the_lines_fit_and_the_table_has_all(three_seeds):
    three_seeds("x" * 30, "linear_mxfp4", seed=1, flags=("--weight-decay", "0.123456789" * 9))
    make_run(three_seeds.root / "late", "linear_mxfp8").result.unlink()
    result = compare_losses([three_seeds.root])
    lines = list(comparison_lines(result))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for part in ("+2.20% [", "3 seeds would detect", "bf16 -> mxfp4", "left out: late"):
        assert part in text
    table = comparison_table(result)
    assert (table["baseline"], table["loss"]) == (BF16, "validation")
    sides = {side["label"]: side for side in table["sides"]}
    assert sides["mxfp4"]["gap"]["seen"] is True
    assert [run["seed"] for run in sides["mxfp4"]["runs"]] == ["1", "2", "3"]
