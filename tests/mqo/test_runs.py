"""What a run's folder is read for."""

import json
from pathlib import Path

import pytest
from mqo.runs import RunFolder, checkpoints_of, replace_text, run_of


@pytest.fixture
def run(tmp_path):
    made = RunFolder(tmp_path / "run")
    made.root.mkdir()
    return made


def test_the_checkpoints_of_a_run_are_where_it_saved(run, tmp_path):
    run.config.write_text(json.dumps({"experiment": {"checkpoint": None}}))
    assert checkpoints_of(run.root) == run.checkpoints
    run.config.write_text(json.dumps({"experiment": {"checkpoint": str(tmp_path / "elsewhere")}}))
    assert checkpoints_of(run.root) == tmp_path / "elsewhere"


def test_a_folder_of_checkpoints_is_itself_and_a_bare_run_has_its_own(run):
    assert checkpoints_of(run.root) == run.root
    run.checkpoints.mkdir()
    assert checkpoints_of(run.root) == checkpoints_of(run.checkpoints) == run.checkpoints


def test_a_run_and_its_own_checkpoints_belong_to_the_run(run, tmp_path):
    run.checkpoints.mkdir()
    assert run_of(run.root) is None
    run.config.write_text("{}")
    assert run_of(run.root) == run_of(run.checkpoints) == run
    assert run_of(run.dumps) is None
    assert run_of(tmp_path) is None


def test_two_writers_of_one_file_at_once_do_not_collide(tmp_path, monkeypatch):
    path, write = tmp_path / "record.json", Path.write_text

    def interrupted(self, text, **options):
        written = write(self, text, **options)
        if text == "first":
            replace_text(path, "second")
        return written

    monkeypatch.setattr(Path, "write_text", interrupted)
    replace_text(path, "first")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
