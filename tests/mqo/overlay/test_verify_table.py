from mqo.overlay.verify import EntryResult, Verified
from mqo.overlay.verify_table import lines

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
        "release  sites      wide_sweep  forward        green",
        "1.0.0    applied 2  not needed  run            yes",
        "1.10.0   applied 2  not needed  compiled only  yes",
        "2.0.0    drifted    not needed  not tried      NO",
        "3.0.0    applied 2  not needed  failed         NO",
        "4.0.0    not tried  not tried   not tried      error",
        "1.10.0: compiled only: needs torch, which is not installed",
        "2.0.0: sites drifted: `g(a)` occurs 0 times",
        "3.0.0: not finite",
        "3.0.0: left behind",
        "4.0.0: no such wheel.",
    ]
