"""A trial in a child: what ends well, and each way not to."""

import mmap
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint
from mqo.megatron.run import isolated
from mqo.megatron.run.isolated import Limits, try_first
from mqo.megatron.run.untrusted import UntrustedFileError, read_json

PATH = Path("a/file")
SMALL = Limits(seconds=20, memory=200 << 20)


def problem(work, path, limits):
    """The sentence of a refusal, None without one."""
    try:
        assert try_first(work, path, limits) is None
    except UntrustedFileError as error:
        return str(error)
    return None


def fill():
    return bytearray(10**11)


def fill_and_hide():
    try:
        fill()
    except MemoryError as error:
        raise ValueError("damaged") from error


def fill_a_tensor():
    return torch.empty(10**11)


def fill_in_a_rank():
    try:
        fill_a_tensor()
    except RuntimeError as error:
        failed = torch.distributed.checkpoint.CheckpointException("load", {0: (error, None)})
    raise failed


def map_much():
    return mmap.mmap(-1, 10**12)


def mention(text):
    def work():
        raise ValueError(text)

    return work


def recurse():
    return recurse()


def fail():
    raise ValueError("the caller's own error")


def kill(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "work",
    [
        *(lambda: bytearray(1 << 20), fail),
        *(mention("no key allocate_gradients"), mention("the memory of layer 3 is damaged")),
    ],
)
def test_work_that_ends_is_no_problem_whatever_it_raises(work):
    assert problem(work, PATH, SMALL) is None


@pytest.mark.parametrize(
    "work, words",
    [
        (fill, "too much memory"),
        (fill_and_hide, "too much memory"),
        (fill_a_tensor, "too much memory"),
        (fill_in_a_rank, "too much memory"),
        (map_much, "too much memory"),
        (recurse, "nested"),
        (kill(signal.SIGSEGV), "SIGSEGV"),
        (kill(signal.SIGKILL), "SIGKILL"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: sys.exit(0), "library fails"),
    ],
)
def test_a_death_is_a_sentence_that_names_the_file(work, words):
    found = problem(work, PATH, SMALL)
    assert found.startswith(str(PATH)) and words in found


def test_the_refusal_of_a_file_is_passed_on(tmp_path):
    path = tmp_path / "a\udcff.json"
    with pytest.raises(UntrustedFileError) as own:
        read_json(path)
    assert problem(lambda: read_json(path), PATH, SMALL) == str(own.value)


def test_work_without_end_is_ended():
    found = problem(lambda: [None for _ in iter(int, 1)], PATH, Limits(0.2, 1 << 40))
    assert str(PATH) in found and "too long" in found


def test_nothing_of_the_child_reaches_this_process(capfd):
    held, before = [], resource.getrlimit(resource.RLIMIT_AS)
    children = set(psutil.Process().children())
    problem(lambda: (held.append(1), print("said", flush=True), os.write(2, b"said")), PATH, SMALL)
    assert held == [] and capfd.readouterr() == ("", "")
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert set(psutil.Process().children()) <= children


def test_a_process_with_a_gpu_is_not_forked(monkeypatch):
    monkeypatch.setattr(isolated, "_has_cuda", lambda: True)
    monkeypatch.setattr(os, "fork", None)
    assert problem(fill, PATH, SMALL) is None


# A program under the user's own limits (`ulimit -v`, a batch system's) tries a file like any other.
UNDER_LIMITS = """
import os, resource, sys
from pathlib import Path
from mqo.megatron.run.isolated import Limits, try_first
for kind, most in ((resource.RLIMIT_AS, 8 << 30), (resource.RLIMIT_CPU, 15)):
    resource.setrlimit(kind, (most, most))
me, limits = os.getpid(), Limits(20, 200 << 20)
try:
    try_first(lambda: bytearray(1 << 20), Path("small"), limits)
    print("taken")
    try_first(lambda: bytearray(10**11), Path("large"), limits)
except BaseException as error:
    print("parent" if os.getpid() == me else "child", error)
"""


def test_hard_limits_of_the_user_neither_refuse_a_file_nor_lift_the_trials_own():
    ended = subprocess.run(
        [sys.executable, "-c", UNDER_LIMITS], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    taken, refused = ended.stdout.splitlines()
    assert taken == "taken"
    assert refused.startswith("parent large") and "too much memory" in refused


def test_a_child_that_cannot_be_limited_tries_nothing(monkeypatch, tmp_path):
    def deny(kind, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", deny)
    mark = tmp_path / "mark"
    found = problem(mark.touch, PATH, SMALL)
    assert found and found.startswith("a/file cannot be loaded: it ends the program")
    assert not mark.exists()


def test_the_memory_of_the_machine_bounds_a_trial(monkeypatch):
    monkeypatch.setattr(isolated, "available_memory", lambda: 100 << 20)
    assert "0.0 GiB" in problem(lambda: bytearray(1 << 30), PATH, Limits(20, 1 << 40))


def test_available_memory_is_that_of_the_tightest_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "_CGROUP", tmp_path)
    free = isolated.available_memory()
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert isolated.available_memory() > 1000
    (tmp_path / "memory.max").write_text("5000\n")
    assert isolated.available_memory() == 4000


def test_the_memory_is_what_the_group_of_processes_may_use(tmp_path, monkeypatch):
    whole = isolated.machine_memory()
    monkeypatch.setattr(isolated, "_CGROUP", tmp_path)
    machine = isolated.machine_memory()
    assert machine >= whole > 0
    for text, expected in (("max\n", machine), ("4096\n", 4096), (f"{1 << 62}\n", machine)):
        (tmp_path / "memory.max").write_text(text)
        assert isolated.machine_memory() == expected
