"""`mqo compare`: paths and names of runs, as text and as JSON."""

import json

import pytest
from mqo.project import Project

from ..report.conftest import make_run


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with two runs, one of them in a sweep."""
    make_run(tmp_path / "runs/one", loss=6.0)
    make_run(tmp_path / "runs/sweeps/tiny/two", "mxfp4", loss=6.3)
    here = Project(tmp_path)
    monkeypatch.setattr(Project, "here", classmethod(lambda cls: here))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words", [["one", "sweeps/tiny"], ["runs/one", "runs/sweeps/tiny/two"], ["runs"]]
)
def test_runs_are_paths_or_names(command_line, project, words):
    code, out, _ = command_line("compare", *words, "--json")
    table = json.loads(out)
    assert code == 0 and table["baseline"] == "bf16 (unquantized)"
    assert table["sides"][1]["gap"]["mean"] == pytest.approx(0.05)
    assert table["sides"][1]["differs"]["quantization.mode"] == ["bf16", "mxfp4"]


def test_the_baseline_can_be_named(command_line, project):
    code, out, _ = command_line("compare", "runs", "--baseline", "mxfp4")
    assert code == 0 and out.startswith("baseline: mxfp4")


@pytest.mark.parametrize("words", [["one"], ["one", "typo"], ["runs", "--baseline", "typo"]])
def test_what_cannot_be_compared_is_refused(command_line, project, words):
    code, out, err = command_line("compare", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
