"""Which runs are one comparison."""

import pytest
from mqo.errors import UnknownNameError
from mqo.launch.libraries import LibraryQuantization
from mqo.report.collect import collect
from mqo.report.compare import compare
from mqo.report.curves import of_runs
from mqo.report.lines import summary
from mqo.report.rows import quantized
from mqo.runs import QUANTIZERS

from .conftest import only, trio


def groups(runs):
    return compare(collect([runs.root])[0])[0]


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


def test_steps_and_data_tell_groups_apart_before_flags_do(runs):
    runs("one")
    runs("two", steps=100, digest="11ee", flags=("--lr", "0.5"), data_prefix="/d/web")
    sample, own = sorted((group.differs for group in groups(runs)), key=lambda d: "web" in d[0])
    names = ["data", "steps", "--lr", "inputs"]
    assert [text.split()[0] for text in sample] == [text.split()[0] for text in own] == names
    assert own[:3] == ("data web", "steps 100", "--lr 0.5")


def test_a_path_is_shown_by_its_name_if_that_is_enough(runs):
    flag = "--pretrained-checkpoint"
    runs("one", flags=(flag, "/long/way/a"))
    runs("two", flags=(flag, "/long/way/b"))
    assert sorted(group.differs for group in groups(runs)) == [(f"{flag} a",), (f"{flag} b",)]
    runs("three", flags=(flag, "/other/a"))
    found = sorted(group.differs for group in groups(runs))
    assert found == [(f"{flag} /long/way/a",), (f"{flag} /other/a",), (f"{flag} b",)]


def test_no_two_groups_have_the_same_title_and_subtitle(runs):
    runs("one")
    for number, flags in enumerate((("--lr", "0.5"), ("--num-layers", "2"), ("--num-layers", "3"))):
        runs(f"flags {number}", flags=flags)
    runs("data", digest="11ee")
    runs("own", digest="22ff", dataset="mine", data_prefix="/d/mine")
    runs("named", called="tiny-qwen", flags=("--num-layers", "2"))
    titles = [group.full_title for group in groups(runs)]
    assert len(set(titles)) == len(titles) == 7
    assert {group.title.split()[0] for group in groups(runs)} == {
        *("llama32-1b", "llama32-1b*", "tiny-qwen")
    }


def test_a_subtitle_names_a_few_differences_and_counts_the_rest(runs):
    runs("one")
    runs("two", flags=("--lr", "1", "--clip-grad", "2", "--min-lr", "0", "--weight-decay", "1"))
    subtitle = groups(runs)[0].subtitle
    assert subtitle.count(",") == 3 and subtitle.endswith("and 1 more")


LIBRARY = LibraryQuantization(library="ModelOpt", format="int8")


def test_gaps_are_to_the_baseline_that_was_named(runs):
    for seed in (1, 2, 3):
        trio(runs, seed, 6.0 + seed / 10, mxfp4=0.02 + 0.001 * seed, FA_mxfp8=-0.01)
    records = collect([runs.root])[0]
    (usual,), (group,) = compare(records)[0], compare(records, baseline="mxfp4")[0]
    assert (usual.reference, group.reference) == ("unquantized", "mxfp4")
    assert group.rows[0].variant == "mxfp4"
    gaps = {row.variant: row.gap and round(row.gap.mean, 4) for row in group.rows}
    assert gaps["mxfp4"] is None
    assert gaps["bf16"] == round(sum(1 / (1.02 + 0.001 * seed) - 1 for seed in (1, 2, 3)) / 3, 4)
    assert group.verdict.choice is None and usual.verdict.choice is not None
    assert "unquantized [" not in "".join(summary(group))


def test_a_baseline_that_no_run_has_or_several_are_is_refused(runs):
    runs("one", "linear_mxfp4")
    runs("all", "linear_mxfp4", gemms="all")
    records = collect([runs.root])[0]
    with pytest.raises(UnknownNameError, match="mxfp8"):
        compare(records, baseline="mxfp8")
    (group,), _ = compare(records, baseline="linear_mxfp4")
    assert group.baseline_variant == "linear_mxfp4"


def test_what_a_library_quantizes_is_no_baseline(runs):
    runs("base")
    runs("int8", library=LIBRARY)
    rows = {row.variant: row for row in only(runs).rows}
    assert set(rows) == {"bf16", "int8 by ModelOpt"}
    ((_, base),) = rows["int8 by ModelOpt"].pairs
    assert base.variant == "bf16"
    assert quantized(rows["int8 by ModelOpt"].types) == "int8 by ModelOpt"
    assert quantized(rows["bf16"].types) == "nothing"


def test_a_library_that_the_training_found_is_no_baseline(runs):
    """A configuration that does not say so: of an older run, or of a checkpoint that changed."""
    found = {"norms": ["torch.RMSNorm"], QUANTIZERS: ["ModelOpt"]}
    runs("int8", implementation=found)
    (row,) = only(runs).rows
    assert row.variant != "bf16" and "ModelOpt" in row.label
    assert not row.pairs
    _, (curve,) = of_runs([row.runs[0].folder])
    assert not curve.difference.steps


@pytest.mark.parametrize(
    "rest", [{"library": LIBRARY}, {"schedule": ("qk: bf16 until 9, then mxfp8",)}]
)
def test_a_plot_draws_no_difference_to_a_quantized_run(runs, rest):
    folders = [runs("one", **rest), runs("two", "mxfp4")]
    assert not any(curve.difference.steps for curve in of_runs(folders)[1])
    folders.append(runs("base"))
    assert sum(bool(curve.difference.steps) for curve in of_runs(folders)[1]) == 2


def test_a_schedule_is_part_of_the_variant(runs):
    runs("base")
    schedule = ("qk: bf16 until 9, then mxfp8",)
    runs("later", schedule=schedule)
    assert [row.label for row in only(runs).rows] == [
        *("bf16 (unquantized)", f"bf16, {schedule[0]}")
    ]


def test_the_terminals_lines_fit_in_80_columns(runs):
    schedule = ("linear: mxfp4 until 0.9, then bf16", "qk: mxfp8 until 0.5, then bf16")
    for seed in (1, 2, 3):
        runs(f"base {seed}", seed=seed, loss=6.0 + seed / 10)
        runs(f"later {seed}", "linear_mxfp4", seed=seed, loss=6.1 + seed / 11, schedule=schedule)
        runs(f"diverged {seed}", "linear_mxfp4", seed=seed, loss=10.0 ** (3 + seed), gemms="all")
    runs("other", flags=("--pretrained-checkpoint", "/a/" + "long" * 20, "--lr", "1"))
    lines = [line for group in groups(runs) for line in summary(group)]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert f"linear_mxfp4, {schedule[0]}, {schedule[1]}" in text
    assert text.count("only here: ") == 2


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
