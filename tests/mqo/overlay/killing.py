"""Stopping a command at a step: by an exception here, or by SIGKILL in a process forked off."""

import os
import signal
from collections import Counter

from mqo.overlay import transaction

COMMIT_PHASES = ("stage", "journal", "files", "records", "tidy", "done")
BUILD_PHASES = ("building", "built")
# The phases at which the change has not been decided on; behind them it will be made.
ROLLED_BACK = ("stage", "journal", *BUILD_PHASES)


class StoppedError(Exception):
    """Stands for a process that ends."""


def steps_of(action, monkeypatch):
    """{step: how often} of an action, which is carried out."""
    counted = Counter()
    with monkeypatch.context() as patch:
        patch.setattr(transaction, "step", lambda name: counted.update([name]))
        action()
    return counted


def stopper(name, number, end):
    """A `transaction.step` that calls `end` at the occurrence `number` (from 1) of a step."""
    counted = Counter()

    def step(reached):
        counted[reached] += 1
        if reached == name and counted[name] == number:
            end()

    return step


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(action):
    """Carry out an action in a forked process; whether it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WIFSIGNALED(status)


def killed_at(name, number, action):
    """Carry out an action in a process that is killed at a step; whether it got there."""

    def run():
        transaction.step = stopper(name, number, kill_me)
        action()

    return in_child(run)


def events_until(number, action):
    """Carry out an action in a process killed before its audit event `number` that changes files.

    Those are opening to write, renaming, removing, making folders, and setting modes: a finer mesh
    than the steps. Whether it got there.
    """
    changing = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "open"}
    seen = Counter()

    def hook(event, arguments):
        if event in changing and not (event == "open" and not arguments[2] & os.O_ACCMODE):
            seen["all"] += 1
            if seen["all"] == number:
                kill_me()

    def run():
        import sys

        sys.addaudithook(hook)
        action()

    return in_child(run)
