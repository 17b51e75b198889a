"""Processes that are to end: those that have left the group, and those that will not, too."""

import os
import signal
import subprocess
import sys

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


def test_a_request_to_save_reaches_the_workers_and_not_what_started_them():
    before = signal.getsignal(process.SAVE)
    command = [sys.executable, "-c", AGENT, SAVER]
    with (
        process.leaves_on_signal() as leaving,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent,
    ):
        assert agent.stdout.readline() == "runs\n"
        leaving.watch(agent)
        assert not leaving.was_asked
        agent.send_signal(process.SAVE)
        os.kill(os.getpid(), process.SAVE)
        assert agent.wait() == 0
        assert leaving.was_asked
    assert signal.getsignal(process.SAVE) == before
