"""Processes that are to end: those that have left the group, and those that will not, too."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from mqo import process

# A worker in a session of its own that ignores SIGTERM, as none should and some do. It holds a pipe
# open: a byte says that it runs, the pipe's end that it is gone.
WORKER = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pipe = open(sys.argv[1], "wb", buffering=0)
pipe.write(b"x")
signal.pause()
"""
PARENT = """
import signal, subprocess, sys
if sys.argv[3] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
subprocess.Popen(command, start_new_session=True).wait()
"""


@pytest.mark.parametrize("kind", ["obedient", "stubborn"])
def test_a_worker_in_a_session_of_its_own_ends_as_well(tmp_path, kind):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-c", PARENT, WORKER, str(pipe), kind]
    parent = subprocess.Popen(command, start_new_session=True)
    with pipe.open("rb", buffering=0) as reader:
        assert reader.read(1) == b"x"
        process.end(parent, grace=0.1 if kind == "stubborn" else 60)
        assert reader.read(1) == b"", "the worker lives on"
    assert parent.returncode == (-signal.SIGKILL if kind == "stubborn" else -signal.SIGTERM)


def test_what_has_ended_already_is_no_error():
    done = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    done.wait()
    process.end(done)


@pytest.mark.parametrize(
    ("signum", "raised", "code"),
    [
        (signal.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, SystemExit, 128 + signal.SIGTERM),
        (signal.SIGHUP, SystemExit, 128 + signal.SIGHUP),
    ],
)
def test_a_signal_unwinds_and_the_handlers_of_before_come_back(signum, raised, code):
    before = signal.getsignal(signum)
    with pytest.raises(raised) as left, process.stops_raise():
        os.kill(os.getpid(), signum)
    assert getattr(left.value, "code", None) == code
    assert signal.getsignal(signum) == before


# A worker as torchrun has them, which does at SIGTERM what upstream does: it saves, and ends well.
SAVER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *args: sys.exit(0))
print("runs", flush=True)
signal.pause()
"""
# In torchrun's place: any signal of its own would end it, and SAVE goes to it as well.
AGENT = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""


@pytest.mark.parametrize("words", [(AGENT, SAVER), (SAVER,)], ids=["torchrun", "alone"])
def test_a_request_to_save_reaches_the_workers_and_not_what_started_them(words):
    before = signal.getsignal(process.SAVE)
    command = [sys.executable, "-c", *words]
    with (
        process.leaves_on_signal() as leaving,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent,
    ):
        assert agent.stdout.readline() == "runs\n"
        leaving.watch(agent, is_worker=words == (SAVER,))
        assert not leaving.was_asked
        if words == (AGENT, SAVER):
            agent.send_signal(process.SAVE)
        os.kill(os.getpid(), process.SAVE)
        assert agent.wait() == 0
        assert leaving.was_asked
    assert signal.getsignal(process.SAVE) == before


def test_a_signal_waits_for_the_end_of_what_may_not_be_interrupted():
    done = []
    with pytest.raises(SystemExit), process.stops_raise():
        with process.held():
            with process.held():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]


def test_a_second_signal_does_not_interrupt_the_cleaning_up(tmp_path):
    """`timeout` sends two: one to the process, and one to its group."""
    with pytest.raises(SystemExit), process.stops_raise():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "cleaned").touch()
    assert (tmp_path / "cleaned").exists()


def test_an_impatient_user_is_heard_in_the_end(monkeypatch):
    monkeypatch.setattr(process, "SAME_REQUEST_S", -1)
    with pytest.raises(KeyboardInterrupt), process.stops_raise():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)


def test_what_nohup_ignores_stays_ignored():
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with process.stops_raise():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_temporary_folder_goes_with_its_block(tmp_path):
    with pytest.raises(SystemExit), process.temporary_folder("mill-", tmp_path) as folder:
        (folder / "flour").touch()
        assert [path.name[:5] for path in tmp_path.iterdir()] == ["mill-"]
        os.kill(os.getpid(), signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_runs_too_long_is_ended(tmp_path):
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(subprocess.TimeoutExpired) as error:
        process.run([sys.executable, "-c", code], limit_s=5)
    with pytest.raises(ProcessLookupError):
        os.kill(int(error.value.output), 0)


def test_a_command_gets_its_input_and_a_temporary_folder_that_is_removed():
    code = "import sys, tempfile; print(tempfile.mkdtemp() + sys.stdin.read()); sys.exit(3)"
    done = process.run([sys.executable, "-c", code], input=b"/x")
    assert (done.returncode, done.stderr) == (3, b"")
    folder = os.path.dirname(done.stdout.decode().strip())  # noqa: PTH120
    assert "mqo-command-" in folder and not os.path.exists(folder)  # noqa: PTH110


def test_threads_start_processes_too():
    """Signals are the main thread's: there the handlers are already, or nobody wants them."""
    with ThreadPoolExecutor(2) as pool:
        codes = [
            pool.submit(process.run, [sys.executable, "-c", f"raise SystemExit({n})"])
            for n in (3, 4)
        ]
    assert [code.result().returncode for code in codes] == [3, 4]
