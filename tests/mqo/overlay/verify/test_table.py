from mqo.overlay.series import Series
from mqo.overlay.verify.release import EntryResult, Verified
from mqo.overlay.verify.table import table_lines
from mqo.project import Project

APPLIED = (EntryResult("sites", "applied", 2), EntryResult("wide_rule", "not needed"))
DRIFTED = (EntryResult("sites", "drifted", why="`g(a)` occurs 0 times"), APPLIED[1])
UNTRIED = tuple(EntryResult(entry.name, "not tried") for entry in APPLIED)


def test_a_row_a_release_and_what_is_to_be_said_below():
    results = [
        Verified("1.0.0", APPLIED, "run"),
        Verified("1.10.0", APPLIED, "compiled only", "torch"),
        Verified("2.0.0", DRIFTED),
        Verified("3.0.0", APPLIED, "failed", faults=("not finite", "left behind")),
        Verified("4.0.0", UNTRIED, error="no such wheel."),
    ]
    assert table_lines(results) == [
        "             1.0 1.10 2.0  3.0  4.0",
        "sites        yes yes  LOST yes  ?",
        "wide_rule    -   -    -    -    ?",
        "forward pass run comp ?    FAIL ?",
        "NOT green: 2.0.0, 3.0.0, 4.0.0",
        "1.10.0: compiled only: needs torch, which is not installed",
        "2.0.0: sites drifted: `g(a)` occurs 0 times",
        "3.0.0: not finite",
        "3.0.0: left behind",
        "4.0.0: no such wheel.",
    ]


def test_green_releases_are_said_to_be_so():
    assert table_lines([Verified("1.0.0", APPLIED, "run")])[-1] == "all green"


def test_releases_that_differ_in_their_last_number_only_are_named_whole():
    results = [Verified(version, APPLIED, "run") for version in ("1.0.0", "1.0.1")]
    assert table_lines(results)[0].split() == ["1.0.0", "1.0.1"]


def test_the_repositorys_series_on_all_releases_fits_80_columns():
    entries = Series.of_project(Project.here()).entries
    drifted = tuple(EntryResult(entry.name, "drifted", why="x") for entry in entries)
    versions = [f"0.{minor}.{minor % 4}" for minor in range(10, 20)]
    results = [Verified(version, drifted) for version in versions]
    assert max(map(len, table_lines(results)[: len(entries) + 2])) <= 80
