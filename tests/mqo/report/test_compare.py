"""Which runs are one comparison."""

import pytest
from mqo.report.collect import collect
from mqo.report.compare import compare

from .conftest import only


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
