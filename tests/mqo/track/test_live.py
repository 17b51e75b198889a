"""Runs that are tracked while a small program of our own trains them, with a real tracker."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from mqo.errors import RunError
from mqo.launch import run as launch
from mqo.launch.config import Cluster, resolve
from mqo.launch.flags import RunData
from mqo.track import live

from .conftest import make_run

NAMES = ("llama32-1b", "wikipedia", "bf16", "tiny")
LIMIT_S = 120
HEAD = f"""
    import json, sys, time
    from pathlib import Path
    run, store = map(Path, sys.argv[1:3])
    def row(iteration, value):
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write(json.dumps({{"iteration": iteration, "name": "lm loss", "value": value}}))
            lines.write("\\n")
    def wait_for(folder, pattern):
        until = time.monotonic() + {LIMIT_S}
        while not list(folder.glob(pattern)):
            assert time.monotonic() < until, pattern + " never came"
            time.sleep(0.05)
"""
# Training goes on only when the tracker has the first step.
TWO_STEPS = "row(1, 8.0); wait_for(store, '*/*/metrics/lm loss'); row(2, 7.5)"


@pytest.fixture
def run(tmp_path):
    """A run folder, prepared."""
    made = make_run(tmp_path / "with space", ())
    made.metrics.unlink()
    made.result.unlink()
    return made


def train(run, body, *words, tracker="mlflow", report=print, cluster=None):
    """Train by a program that knows `run`, and `store` as the first of `words`."""
    text = textwrap.dedent(HEAD) + textwrap.dedent(body)
    command = [sys.executable, "-c", text, str(run.root), *map(str, words or ["."])]
    config = resolve(*NAMES, cluster=cluster or Cluster())
    data = RunData(run.root, run.root, None)
    return launch.train(run, config, command, {}, data, {}, report, tracker)


@pytest.mark.slow
def test_rows_are_there_while_the_run_trains(run, mlflow_store):
    said = []
    result = train(run, TWO_STEPS, mlflow_store.root, report=said.append)
    assert result.train_loss == 7.5
    (found,) = mlflow_store.runs()
    assert (found.name, found.status) == ("with space", "finished")
    assert found.metrics == {"lm loss": [(1, 8.0), (2, 7.5)]}
    assert found.files["result.json"] == run.result.read_bytes()
    assert any(line.startswith("tracker  : mlflow: run ") for line in said)
    assert not any(line.startswith("warning") for line in said)


@pytest.mark.slow
def test_a_training_that_fails_is_closed_as_failed(run, mlflow_store):
    body = f"{TWO_STEPS}\n(run / 'failure.txt').write_text('GuardError: no qk'); sys.exit(3)"
    with pytest.raises(RunError, match="GuardError: no qk"):
        train(run, body, mlflow_store.root)
    (found,) = mlflow_store.runs()
    assert found.status == "failed"
    assert found.metrics == {"lm loss": [(1, 8.0), (2, 7.5)]}
    assert found.files["failure.txt"] == b"GuardError: no qk"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_launcher_leaves_no_run_that_seems_to_train(run, mlflow_store, signum):
    program = textwrap.dedent(HEAD) + f"row(1, 8.0); time.sleep({LIMIT_S})"
    code = f"""
        import sys
        from pathlib import Path
        from mqo import process
        from mqo.launch import run as launch
        from mqo.launch.config import resolve
        from mqo.launch.flags import RunData
        from mqo.runs import RunFolder
        place = Path({str(run.root)!r})
        command = [sys.executable, "-c", {program!r}, str(place), "."]
        data = RunData(place, place, None)
        with process.command():
            config = resolve(*{NAMES!r})
            launch.train(RunFolder(place), config, command, {{}}, data, {{}}, print, "mlflow")
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.DEVNULL
    )
    wait_until(lambda: list(mlflow_store.root.glob("*/*/metrics/lm loss")))
    launcher.send_signal(signum)
    assert launcher.wait(LIMIT_S) != 0
    wait_until(lambda: mlflow_store.runs()[0].status == "failed")
    (found,) = mlflow_store.runs()
    assert found.metrics == {"lm loss": [(1, 8.0)]}


def wait_until(true):
    until = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_a_tracker_without_a_login_is_a_warning_and_training_goes_on(run, tmp_path, monkeypatch):
    """The program ends only when the warning was printed."""
    pytest.importorskip("wandb", reason="the extra `trackers` is not installed")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    said = []

    def report(line):
        said.append(line)
        if line.startswith("warning"):
            (tmp_path / "warned").touch()

    body = "row(1, 8.0); wait_for(store, 'warned'); row(2, 7.5)"
    result = train(run, body, tmp_path, tracker="wandb", report=report)
    assert result.train_loss == 7.5
    (warning,) = (line for line in said if line.startswith("warning"))
    assert "wandb failed: No API key" in warning
    assert f"`mqo track '{run.root}' --tracker wandb`" in warning


@pytest.mark.slow
def test_a_tracker_that_hangs_is_ended_behind_the_training(run, monkeypatch):
    """A server that takes connections and never answers."""
    import socket

    pytest.importorskip("mlflow", reason="the extra `trackers` is not installed")
    monkeypatch.setattr(live, "END_S", 1)
    said = []
    with socket.create_server(("localhost", 0)) as server:
        uri = f"http://localhost:{server.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        result = train(run, "row(1, 8.0)", report=said.append)
    assert result.train_loss == 8.0
    (warning,) = (line for line in said if line.startswith("warning"))
    assert "mlflow took over 1 s" in warning
    assert f"`mqo track '{run.root}' --tracker mlflow`" in warning


def test_a_tracker_that_is_killed_is_a_warning(run, tmp_path, monkeypatch):
    ends = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    started = live.started
    monkeypatch.setattr(live, "started", lambda command, **rest: started(ends, **rest))
    said = []
    assert train(run, "row(1, 8.0)", report=said.append).train_loss == 8.0
    (warning,) = (line for line in said if line.startswith("warning"))
    assert "mlflow" in warning and "-9" in warning


def test_of_several_nodes_only_the_last_has_a_tracker(run, monkeypatch):
    begun = []
    spawned = [sys.executable, "-c", "print('run 1')"]
    started = live.started
    monkeypatch.setattr(
        live, "started", lambda command, **rest: begun.append(command) or started(spawned, **rest)
    )
    for rank in (0, 1):
        train(run, "row(1, 8.0)", cluster=Cluster(nnodes=2, node_rank=rank))
        assert len(begun) == rank
    (command,) = begun
    assert command[1:] == ["-m", "mqo", "track", str(run.root), "--tracker", "mlflow", "--live"]
