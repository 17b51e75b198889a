"""What is refused before and around a tracker, and what is noted of it; no tracker is started."""

import importlib.util
import json

import pytest
from mqo.errors import RunError, SetupError, TrackerError, UnknownNameError
from mqo.runs import SWEEP
from mqo.track import sent, session
from mqo.track.tracker import Sent

from .conftest import draw, make_run


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_whose_package_is_missing_is_refused(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=rf"{name}.*pip install.*\[trackers\]"):
        session.check(name)


def test_an_unknown_tracker_lists_those_there_are():
    with pytest.raises(UnknownNameError, match=r"tracker .*'comet'.*mlflow, wandb"):
        session.check("comet")


def test_what_a_tracker_raises_is_one_paragraph_with_the_command_that_helps(tmp_path, monkeypatch):
    class Broken:
        def create(self, run):
            raise ConnectionError("no\nroute")

    monkeypatch.setitem(session.TRACKERS, "mlflow", Broken)
    run = make_run(tmp_path / "with space")
    with pytest.raises(TrackerError, match=r"mlflow .*: no route\. `mqo track '.*/with space'"):
        session.track(run, "mlflow", draw)
    assert not run.trackers.exists()


def test_a_run_with_a_damaged_configuration_is_refused_before_the_tracker_gets_it(
    tmp_path, monkeypatch
):
    class Unused:
        def create(self, run):
            pytest.fail("a run was created")

    monkeypatch.setitem(session.TRACKERS, "mlflow", Unused)
    run = make_run(tmp_path / "one")
    run.config.write_text("{")
    with pytest.raises(RunError, match="cell"):
        session.track(run, "mlflow", draw)


def test_a_run_that_is_being_sent_is_refused(tmp_path):
    run = make_run(tmp_path / "one")
    with sent.held(run), pytest.raises(TrackerError, match=f"{run.root}.*--tracker"):
        session.track(run, "mlflow", draw)


@pytest.mark.parametrize("text", ["", "[]", '{"wandb": 3}', '{"wandb": {"name": "x"}}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    run = make_run(tmp_path / "one")
    run.trackers.write_text(text)
    with pytest.raises(TrackerError, match=r"trackers\.json .*`mqo track`"):
        session.track(run, "mlflow", draw)
    assert run.trackers.read_text() == text


def test_runs_are_found_in_folders_of_them(tmp_path):
    for name in ("b", "a"):
        make_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / SWEEP).write_text("{}")
    found = session.find([tmp_path / "runs", tmp_path / "runs" / "b"])
    assert [run.root.name for run in found] == ["a", "b", "b"]
    with pytest.raises(RunError) as caught:
        session.find([tmp_path / "nowhere"])
    text = f"{tmp_path}/nowhere holds no run. Expected: folders with a cell.json."
    assert str(caught.value) == text


def test_what_is_noted_survives_for_the_other_tracker(tmp_path):
    run = make_run(tmp_path / "one")
    sent.write(run, "wandb", Sent("w", 1, "failed"))
    sent.write(run, "mlflow", Sent("m", 2))
    assert sent.read(run) == {"wandb": Sent("w", 1, "failed"), "mlflow": Sent("m", 2)}
    assert json.loads(run.trackers.read_text())["wandb"]["rows"] == 1
