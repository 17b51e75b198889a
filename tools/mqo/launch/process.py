"""A training process, and all that it starts: whatever ends us, they end as well."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Asks a run to save and leave, as batch systems do ahead of a time limit; it may take its time.
SAVE = signal.SIGUSR1
GRACE_S = 15


@contextmanager
def stops_raise() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP unwind the stack, so that everything is tidied up."""

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)

    old = {s: signal.signal(s, stop) for s in STOPS}
    try:
        yield
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)


@contextmanager
def ended_with_us(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Around a process that leads a session of its own."""
    with stops_raise():
        try:
            yield process
        finally:
            if process.poll() is None:
                for s in STOPS:  # whoever is impatient would leave processes behind
                    signal.signal(s, signal.SIG_IGN)
                end(process)


class Leaving:
    """What SAVE does to a training process: `was_asked` says whether it came."""

    def __init__(self) -> None:
        self.was_asked = False

    def watch(self, process: subprocess.Popen) -> None:
        """From now on, pass SAVE on to the workers of `process`, which is torchrun.

        They get SIGTERM, at which upstream finishes the step, saves and ends the program. torchrun
        gets nothing: it would kill them after half a minute.
        """

        def ask(signum: int, frame: object) -> None:
            self.was_asked = True
            with suppress(psutil.NoSuchProcess):
                for worker in psutil.Process(process.pid).children():
                    worker.terminate()

        signal.signal(SAVE, ask)


@contextmanager
def leaves_on_signal() -> Iterator[Leaving]:
    """Around the start and the life of a training process.

    SAVE is ignored by what is started inside, for some batch systems send it to every process.
    """
    old = signal.signal(SAVE, signal.SIG_IGN)
    try:
        yield Leaving()
    finally:
        signal.signal(SAVE, old)


def end(process: subprocess.Popen, grace: float = GRACE_S) -> None:
    """End the process, its group, and what has left the group; ask first, for `grace` seconds.

    torchrun gives each worker a session of its own, which no signal to the group reaches.
    """
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    for s in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, s)
            process.wait(timeout=grace)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    _, alive = psutil.wait_procs(below, timeout=0)
    for worker in alive:
        worker.kill()
