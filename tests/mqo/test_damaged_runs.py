"""Run folders of somebody else, or of a broken disk: every command that reads them compares, draws
or replays them, leaves them out, or ends in one paragraph.
"""

import json

import pytest
from mqo.launch import rerun
from mqo.report import pictures

from .damage import attempt, stop
from .report.conftest import make_run

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """A run, another one that is to be damaged, and the commands that read both."""
    one, other = tmp_path / "sound" / "one", tmp_path / "sound" / "other"
    for root, mode in ((one, "bf16"), (other, "mxfp4")):
        run = make_run(root, mode, steps=20)
        (run.source / "pretrain_gpt.py").write_text("")
        facts = json.loads(run.environment.read_text())
        facts["inputs"]["files"] = {}
        run.environment.write_text(json.dumps(facts))
    create = rerun.create
    # A replay ends where its training would begin, and has its folder in the test's place.
    monkeypatch.setattr(rerun, "train", stop)
    monkeypatch.setattr(rerun, "create", lambda _, title: create(tmp_path / "made replays", title))
    # What takes long: to draw each picture in three formats.
    monkeypatch.setattr(pictures, "FORMATS", ("png",))
    made = tmp_path / "made"
    return other, [
        ("report", one, other, "-o", made),
        ("plot", other, "-o", tmp_path / "made.png"),
        ("plot", other, "--operands", "-o", tmp_path / "made2.png"),
        ("perf", "--compare", one, other),
        ("rerun", other, "--allow-versions", "--trust"),
    ]


@pytest.mark.parametrize("seeds", [6, pytest.param(1000, marks=pytest.mark.heavy)])
def test_a_damaged_run_is_no_traceback(command_line, two_runs, seeds):
    found = attempt(command_line, *two_runs, range(seeds), each=2)
    assert {(0, False), (2, False)} <= found
    assert seeds == 6 or (2, True) in found
