from mqo.overlay.series import Series
from mqo.overlay.verify.release import EntryResult, Verified
from mqo.overlay.verify.table import lines
from mqo.project import Project

APPLIED = (EntryResult("sites", "applied", 2), EntryResult("wide_sweep", "not needed"))
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
    assert lines(results) == [
        "                  wide",
        "release sites     sweep     forward",
        "1.0.0   yes       -         run",
        "1.10.0  yes       -         compiled",
        "2.0.0   drifted   -         not tried",
        "3.0.0   yes       -         failed",
        "4.0.0   not tried not tried not tried",
        "NOT green: 2.0.0, 3.0.0, 4.0.0",
        "1.10.0: compiled only: needs torch, which is not installed",
        "2.0.0: sites drifted: `g(a)` occurs 0 times",
        "3.0.0: not finite",
        "3.0.0: left behind",
        "4.0.0: no such wheel.",
    ]


def test_green_releases_are_said_to_be_so():
    assert lines([Verified("1.0.0", APPLIED, "run")])[-1] == "all green"


def test_the_repositorys_series_fits_80_columns():
    entries = Series.of(Project.here()).entries
    results = tuple(
        EntryResult(e.name, "applied" if e.kind != "sweep" and e.holds_in("0.10") else "not needed")
        for e in entries
    )
    result = Verified("0.19.2", results, "compiled only")
    assert max(map(len, lines([result])[:-1])) <= 80
