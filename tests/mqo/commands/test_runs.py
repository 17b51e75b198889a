"""`mqo runs`: which runs there are, what one of them is, and which are removed."""

import json
import os
import pty
import subprocess
import sys
import time

import pytest
from mqo.launch import run_state
from mqo.launch.checkpoint_lock import locked
from mqo.launch.config import Cluster
from mqo.launch.options import ENVIRONMENT_VARIABLE
from mqo.project import Project

from ..report.conftest import make_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a run of each state, in the order of their starts, one of them in a sweep."""
    root = tmp_path / "runs"
    names = {
        "finished": "2026-01-02_030405_a",
        "killed": "2026-01-02_030406_b",
        "failed": "2026-01-03_000000_c",
        "unreadable": "2026-01-04_000000_d",
    }
    for state, name in names.items():
        run = make_run(root / name, "mxfp4", steps=20)
        run.log.write_text("a word\n")
        if state != "finished":
            run.result.unlink()
        if state == "failed":
            run.failure.write_text("it diverged")
        if state == "unreadable":
            run.config.write_text("{")
    make_run(root / "sweeps/tiny/run", steps=20)
    here = Project(tmp_path)
    monkeypatch.setattr(Project, "here", classmethod(lambda cls: here))
    return root


def test_the_list_has_state_steps_and_loss_with_the_newest_last(command_line, folder):
    code, out, _ = command_line("runs", "--json")
    rows = json.loads(out)["runs"]
    assert code == 0
    states = ["finished", "killed", "failed", "unreadable", "finished"]
    assert [row["state"] for row in rows] == states
    assert [row["name"] for row in rows][-2:] == ["2026-01-04_000000_d", "sweeps/tiny/run"]
    first = rows[0]
    assert (first["started"], first["step"], first["steps"]) == ("2026-01-02T03:04:05", 20, 20)
    assert (first["loss"], first["validated"]) == (6.0, True)
    assert first["size"] > 4096
    assert "cell.json" in rows[3]["fault"]


def test_the_list_fits_in_80_columns(command_line, folder):
    code, out, _ = command_line("runs", "--runs", folder)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[0] == "2026-01-02_030405_a"
    for word in ("finished", "killed", "failed", "unreadable", "20/20", "validation loss 6.0000"):
        assert word in out


def test_a_folder_without_runs_is_refused(command_line, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, err = command_line("runs", "--runs", tmp_path / "empty")
    assert code == 2 and "mqo train" in err


def test_a_run_is_shown(command_line, folder):
    code, out, _ = command_line("runs", "show", "sweeps/tiny/run")
    assert code == 0
    for word in ("experiment.model.name", "llama32-1b", "validation loss 6.0000", "metrics.jsonl"):
        assert word in out
    assert max(map(len, out.splitlines()[:-20])) <= 80
    code, out, _ = command_line("runs", "show", folder / "2026-01-03_000000_c", "--json")
    table = json.loads(out)
    assert table["run"]["state"] == "failed" and "it diverged" in table["result"]
    assert table["settings"]["quantization.mode"] == "mxfp4"
    assert "failure.txt" in table["files"]


@pytest.mark.parametrize("name", ["typo", "sweeps", "2026-01-02_030405_a/source", ""])
@pytest.mark.parametrize("command", ["show", "rm"])
def test_what_is_not_a_run_is_refused(command_line, folder, command, name):
    code, out, err = command_line("runs", command, name)
    assert (code, out) == (2, "") and "mqo runs" in err


def test_a_run_that_cannot_be_read_is_not_shown_but_removed(command_line, folder):
    assert command_line("runs", "show", "2026-01-04_000000_d")[0] == 2
    assert command_line("runs", "rm", "2026-01-04_000000_d", "--yes")[0] == 0
    assert not (folder / "2026-01-04_000000_d").exists()


def test_runs_are_removed_with_their_read_only_source(command_line, folder):
    names = ["2026-01-02_030405_a", "sweeps/tiny/run"]
    (folder / names[0] / "source/megatron").chmod(0o500)
    code, out, _ = command_line("runs", "rm", *names, names[0], "--yes")
    assert code == 0 and "removed: 2" in out
    assert not any((folder / name).exists() for name in names)
    assert len(list(folder.iterdir())) == 4  # nothing hidden is left


def test_without_a_terminal_yes_is_needed(command_line, folder):
    code, _, err = command_line("runs", "rm", "2026-01-02_030405_a")
    assert code == 2 and "--yes" in err
    assert (folder / "2026-01-02_030405_a").exists()


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"\n", 1), (b"y\n", 0)])
def test_on_a_terminal_it_asks(folder, answer, code):
    name = folder / "2026-01-02_030405_a"
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    try:
        words = [sys.executable, "-m", "mqo", "runs", "rm", name]
        done = subprocess.run(words, stdin=theirs, capture_output=True, text=True)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == code, done.stderr
    assert name.exists() == bool(code)


def test_a_link_to_a_run_is_not_removed(command_line, folder):
    (folder / "link").symlink_to(folder / "2026-01-02_030405_a")
    code, _, err = command_line("runs", "rm", "link", "--yes")
    assert code == 2 and "symbolic link" in err
    assert (folder / "2026-01-02_030405_a").exists()


def test_options_before_show_are_refused(command_line, folder):
    for words in (["--json"], ["--runs", folder]):
        assert command_line("runs", *words, "show", "2026-01-02_030405_a")[0] == 2


# -- a run that is running -----------------------------------------------------------------------


def refused_to_remove(command_line, name):
    code, _, err = command_line("runs", "rm", "2026-01-02_030405_a", name, "--yes")
    return code == 2 and "is running" in err


def test_a_run_with_a_training_process_is_running(folder):
    run = make_run(folder / "training")
    run.result.unlink()
    run.log.write_text("")
    variables = os.environ | {ENVIRONMENT_VARIABLE: str(run.quant_config)}
    with subprocess.Popen(["sleep", "60"], env=variables) as process:
        try:
            words = [sys.executable, "-m", "mqo", "runs", "rm", run.root, "--yes"]
            done = subprocess.run(words, capture_output=True, text=True)
        finally:
            process.kill()
    assert done.returncode == 2 and "is running" in done.stderr
    assert run.root.exists()


def test_a_run_that_holds_its_checkpoint_is_running(command_line, folder, tmp_path):
    run = make_run(folder / "saving", flags=("--save", str(tmp_path / "saved")))
    run.result.unlink()
    run.log.write_text("")
    with locked(tmp_path / "saved", run.root, Cluster(), print):
        assert refused_to_remove(command_line, "saving")
    assert (folder / "2026-01-02_030405_a").exists()
    assert command_line("runs", "rm", "saving", "--yes")[0] == 0


def test_a_run_that_is_prepared_is_running(command_line, folder):
    run = make_run(folder / "preparing")
    run.result.unlink()
    assert refused_to_remove(command_line, "preparing")
    long_ago = time.time() - 2 * run_state.PREPARING_S
    os.utime(run.root, (long_ago, long_ago))
    assert command_line("runs", "rm", "preparing", "--yes")[0] == 0
