import os
from pathlib import Path

import pytest
from mqo.data import cached
from mqo.data import prepare as preparing
from mqo.data.cached import Contents
from mqo.project import Project


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A checkout that may not be written; the tests' user may be root, who may write anything."""
    root, may = tmp_path / "checkout", os.access
    root.mkdir()
    monkeypatch.setattr(
        os, "access", lambda path, mode: may(path, mode) and root not in (path, path.parent)
    )
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return Project(root)


def test_a_checkout_that_may_be_written_holds_all(tmp_path):
    project = Project(tmp_path)
    assert project.runs == tmp_path / "runs"
    assert project.own_data == project.data == tmp_path / "data"
    assert project.cache == tmp_path / ".cache"


def test_what_is_written_goes_home_where_the_checkout_may_not_be(read_only, tmp_path):
    assert read_only.runs == tmp_path / "home/.local/share/mqo/runs"
    assert read_only.own_data == tmp_path / "home/.local/share/mqo/data"
    assert read_only.cache == tmp_path / "home/.cache/mqo/cache"
    assert read_only.data == read_only.root / "data"


def test_the_xdg_variables_count(read_only, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "d"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert read_only.runs == tmp_path / "d/mqo/runs"
    assert read_only.cache == tmp_path / "c/mqo/cache"


def test_a_folder_of_a_shared_checkout_that_may_be_written_is_used(read_only, monkeypatch):
    (read_only.root / "runs").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path == read_only.root / "runs")
    assert read_only.runs == read_only.root / "runs"
    assert read_only.cache != read_only.root / ".cache"


def test_the_folder_of_runs_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Project.here(Path("mine")).runs == tmp_path / "mine"


CONTENTS = Contents(documents=1, tokens=2, vocab_size=3)


def test_data_that_is_ready_is_read_without_a_lock(read_only, monkeypatch):
    monkeypatch.setattr(cached, "load", lambda folder, inputs: CONTENTS)
    ready = preparing.prepare(read_only, "wikipedia", report=print)
    assert ready == (read_only.data / "wikipedia", CONTENTS)
    assert list(read_only.root.iterdir()) == []


def test_data_that_is_missing_is_prepared_at_home(read_only, monkeypatch):
    made = []
    monkeypatch.setattr(cached, "load", lambda folder, inputs: CONTENTS if made else None)
    monkeypatch.setattr(cached, "_build", lambda target, inputs, build: made.append(target))
    folder, _ = preparing.prepare(read_only, "wikipedia", report=print)
    assert folder == read_only.own_data / "wikipedia"
    assert made == [read_only.own_data / "wikipedia"]
    assert list(read_only.root.iterdir()) == []
