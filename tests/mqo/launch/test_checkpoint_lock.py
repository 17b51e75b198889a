"""The lock on CHECKPOINT: who gets it, who is refused, and what is left of it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mqo.errors import DiskFullError, FileError, RunError
from mqo.launch import checkpoint_lock
from mqo.launch.checkpoint_lock import (
    FILE,
    CheckpointLock,
    LockLostError,
    check_free,
    locked,
)
from mqo.launch.config import Cluster
from mqo.launch.lock_holder import STALE_S, Process

ONE = Cluster()
# Takes the lock as one launcher, says so, and holds it until its input ends; the third word is its
# node of as many as the fourth says. With "child" it starts a process that outlives it.
HOLDER = """
import subprocess, sys
from pathlib import Path
from mqo.errors import MqoError
from mqo.launch.checkpoint_lock import locked
from mqo.launch.config import Cluster

folder, run, node, nodes, child = sys.argv[1:]
where = Cluster(nnodes=int(nodes), node_rank=int(node), master_addr="node-0")
try:
    with locked(Path(folder), Path(run), where, print) as lock:
        if child == "child":
            code = "import sys; sys.stdin.read()"
            lock.add(subprocess.Popen([sys.executable, "-c", code]).pid)
            lock.beat()
        print("held", flush=True)
        sys.stdin.read()
except MqoError as error:
    print(error, flush=True)
    sys.exit(2)
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def launcher(folder, tmp_path):
    """A function that starts a launcher, and returns it with the first line that it printed."""
    started = []

    def start(name="first", node=0, nodes=1, child="", **variables):
        words = [folder, tmp_path / name, str(node), str(nodes), child]
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def end(process):
    process.stdin.close()
    return process.wait()


def lock_of(folder, run="second", where=ONE):
    return CheckpointLock(folder, folder.parent / run, where, lambda text: None)


def acquired(folder, run="second", where=ONE, *, take=False):
    lock = lock_of(folder, run, where)
    lock.acquire(take=take)
    return lock


def edit(folder, **changes):
    """Change the only holder in the lock file by hand."""
    table = json.loads((folder / FILE).read_text())
    table["holders"][0] |= changes
    (folder / FILE).write_text(json.dumps(table))


def elsewhere(folder, age):
    """Make the holder one of another host, with a heartbeat of that age in seconds."""
    host = {"name": "node-7", "boot": "another", "pid_namespace": "pid:[1]"}
    edit(folder, host=host, heartbeat=round(time.time()) - age)


def test_a_second_run_is_refused_with_the_first_ones_run_process_and_host(launcher, folder):
    first, said = launcher("first")
    assert said == "held"
    second, said = launcher("second")
    assert second.wait() == 2
    for part in (str(folder), f"run {folder.parent / 'first'}", f"process {first.pid}"):
        assert part in said
    assert os.uname().nodename in said
    with pytest.raises(RunError, match=f"process {first.pid} "):
        check_free(folder, ONE)
    assert end(first) == 0
    assert not folder.exists(), "a folder that only the lock was in"


def test_of_runs_started_at_once_one_gets_it(launcher, folder):
    """Each says at once whether it holds; none that holds ends before all have spoken."""
    folder.mkdir()
    said = [launcher(str(number))[1] for number in range(6)]
    assert said.count("held") == 1
    assert sum(f"{folder} is in use by run {folder.parent}/" in text for text in said) == 5


def test_a_normal_end_leaves_no_file(folder):
    folder.mkdir()
    (folder / "iter_0000001").mkdir()
    with locked(folder, folder.parent / "run", ONE, print) as lock:
        assert (folder / FILE).is_file()
        lock.beat()
    assert [path.name for path in folder.iterdir()] == ["iter_0000001"]


def test_a_run_that_fails_leaves_no_file(folder):
    with pytest.raises(ZeroDivisionError), locked(folder, folder.parent / "run", ONE, print):
        raise ZeroDivisionError
    assert not folder.exists()


def test_a_run_that_saves_nothing_needs_no_lock(folder):
    with locked(None, folder, ONE, print) as lock:
        assert lock is None
    check_free(None, ONE)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_killed_run_on_this_host_is_taken_over(launcher, folder, stop):
    first, _ = launcher()
    first.send_signal(stop)
    first.wait()
    assert (folder / FILE).exists()  # this program has no handler of SIGTERM
    check_free(folder, ONE)
    _, said = launcher("second")
    assert said == "held"


def test_a_process_that_has_the_id_of_the_killed_one_is_not_taken_for_it(folder):
    acquired(folder, "first")
    processes = json.loads((folder / FILE).read_text())["holders"][0]["processes"]
    edit(folder, processes=[processes[0] | {"started": processes[0]["started"] - 1}])
    acquired(folder, "second")
    assert "second" in (folder / FILE).read_text()


def test_the_training_of_a_killed_launcher_is_waited_for(launcher, folder, monkeypatch):
    first, _ = launcher(child="child")
    first.kill()
    first.wait()
    child = json.loads((folder / FILE).read_text())["holders"][0]["processes"][1]["pid"]
    said = []
    lock = CheckpointLock(folder, folder.parent / "second", ONE, said.append)

    def polled(seconds):
        assert str(child) in said[0]
        first.stdin.close()  # which ends the child

    monkeypatch.setattr(checkpoint_lock.time, "sleep", polled)
    lock.acquire()
    assert len(said) == 1
    assert "second" in (folder / FILE).read_text()


def test_a_training_that_does_not_end_is_named(launcher, folder, monkeypatch):
    first, _ = launcher(child="child")
    first.kill()
    first.wait()
    monkeypatch.setattr(checkpoint_lock, "ORPHAN_S", 0)
    child = json.loads((folder / FILE).read_text())["holders"][0]["processes"][1]["pid"]
    with pytest.raises(RunError, match=f"process {child} "):
        acquired(folder)


@pytest.mark.parametrize(("age", "free"), [(0, False), (STALE_S - 60, False), (STALE_S + 1, True)])
def test_a_holder_on_another_host_counts_until_its_heartbeat_is_stale(folder, age, free):
    acquired(folder, "first")
    elsewhere(folder, age)
    if free:
        check_free(folder, ONE)
        acquired(folder)
        return
    with pytest.raises(RunError, match="node-7") as error:
        acquired(folder)
    assert "--take-lock" in str(error.value)
    with pytest.raises(RunError, match="node-7"):
        check_free(folder, ONE)


@pytest.mark.parametrize("part", ["boot", "pid_namespace"])
def test_a_container_with_the_same_host_name_is_another_host(folder, part):
    """Its process ids say nothing here, where no process has them."""
    acquired(folder, "first")
    host = json.loads((folder / FILE).read_text())["holders"][0]["host"] | {part: "another"}
    edit(folder, host=host, processes=[{"pid": 1 << 21, "started": 1}])
    with pytest.raises(RunError, match=f"process {1 << 21} "):
        acquired(folder)


def test_take_lock_takes_it_and_the_other_run_learns_of_it(folder, monkeypatch):
    monkeypatch.setattr(checkpoint_lock, "BEAT_S", 0)
    first = lock_of(folder, "first")
    first.processes = (Process(pid=1 << 21, started=1),)  # another one than this
    first.acquire()
    elsewhere(folder, 0)
    acquired(folder, "second", take=True).beat()
    with pytest.raises(LockLostError, match="second"):
        first.beat()
    first.release()
    assert "second" in (folder / FILE).read_text(), "the lock of another run was removed"


def test_a_sign_of_life_is_written_and_a_removed_file_comes_back(folder, monkeypatch):
    monkeypatch.setattr(checkpoint_lock, "BEAT_S", 0)
    lock = acquired(folder)
    edit(folder, heartbeat=5)
    lock.beat()
    assert json.loads((folder / FILE).read_text())["holders"][0]["heartbeat"] > 5
    (folder / FILE).unlink()
    lock.beat()
    assert "second" in (folder / FILE).read_text()


def test_the_nodes_of_a_run_share_it_and_the_last_removes_it(launcher, folder):
    nodes = [launcher(f"node{node}", node, 3)[0] for node in range(3)]
    runs = {Path(h["run"]).name for h in json.loads((folder / FILE).read_text())["holders"]}
    assert runs == {"node0", "node1", "node2"}
    assert "in use" in launcher("other")[1]
    assert "in use" in launcher("again", 1, 3)[1], "a node of it that runs already"
    assert "in use" in launcher("smaller", 1, 2)[1], "a node of another run"
    for count, node in enumerate(nodes):
        assert (folder / FILE).exists(), count
        assert end(node) == 0
    assert not list(folder.iterdir())


def test_a_node_that_was_killed_and_started_again_joins_its_run(launcher, folder):
    first, _ = launcher("node0", 0, 2)
    launcher("node1", 1, 2)
    first.kill()
    first.wait()
    assert launcher("node0_again", 0, 2)[1] == "held"
    assert len(json.loads((folder / FILE).read_text())["holders"]) == 2


JOB = {"SLURM_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("before", "now", "free"),
    [
        (JOB, JOB | {"SLURM_RESTART_COUNT": "1"}, True),
        (JOB | {"SLURM_RESTART_COUNT": "1"}, JOB | {"SLURM_RESTART_COUNT": "3"}, True),
        (JOB | {"SLURM_RESTART_COUNT": "1"}, JOB | {"SLURM_RESTART_COUNT": "1"}, False),
        (JOB | {"SLURM_RESTART_COUNT": "1"}, JOB, False),
        (JOB, {"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "1"}, False),
        ({}, {"SLURM_RESTART_COUNT": "1"}, False),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_slurm_queued_again_gets_on_on_another_host_at_once(
    folder, monkeypatch, nodes, before, now, free
):
    where = Cluster(nnodes=nodes, master_addr="node-0")

    def with_job(variables):
        for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    with_job(before)
    acquired(folder, "first", where)
    elsewhere(folder, 0)  # killed there, a moment ago
    with_job(now)
    if not free:
        with pytest.raises(RunError, match=f"run {folder.parent}/first"):
            acquired(folder, "second", where)
        return
    check_free(folder, where)
    acquired(folder, "second", where)
    assert len(json.loads((folder / FILE).read_text())["holders"]) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "nonsense", '{"job": 1}', "\udcff", "[" * 9999])
def test_a_damaged_file_is_refused_while_it_is_new(folder, content):
    folder.mkdir()
    path = folder / FILE
    path.write_bytes(content.encode(errors="surrogateescape"))
    if content:
        with pytest.raises(RunError, match="--take-lock"):
            acquired(folder)
        assert path.read_bytes() == content.encode(errors="surrogateescape")
        old = time.time() - STALE_S - 1
        os.utime(path, (old, old))
    acquired(folder)
    assert "second" in path.read_text()


def test_what_a_kill_leaves_of_a_longer_record_does_not_count(folder):
    acquired(folder, "first")
    with (folder / FILE).open("a") as file:
        file.write('"heartbeat": 12}]}')
    with pytest.raises(RunError, match=f"run {folder.parent}/first"):
        acquired(folder)


def test_a_link_and_a_pipe_are_refused(folder, tmp_path):
    folder.mkdir()
    (folder / FILE).symlink_to(tmp_path / "target")
    with pytest.raises(FileError, match=rf"{FILE} .*symbolic link"):
        acquired(folder)
    assert not (tmp_path / "target").exists()
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    with pytest.raises(FileError, match=rf"{FILE} .*not a regular file"):
        acquired(folder)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_said_and_the_record_still_counts(folder, monkeypatch, code):
    def flock(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = []
    lock = CheckpointLock(folder, folder.parent / "first", ONE, said.append)
    lock.acquire()
    assert len(said) == 1 and str(folder) in said[0] and os.strerror(code) in said[0]
    elsewhere(folder, 0)
    with pytest.raises(RunError, match="node-7"):
        acquired(folder)


def test_a_full_disk_is_named_and_leaves_no_file(folder, monkeypatch):
    folder.mkdir()

    def full(*words):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError, match=str(folder)):
        acquired(folder)
    assert not list(folder.iterdir())
