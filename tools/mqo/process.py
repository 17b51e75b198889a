"""Start processes that end with this one, and make temporary folders that end with it, too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from math import inf
from pathlib import Path
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Tells a run to save and exit, as batch systems do before a time limit; it may take a while.
SAVE = signal.SIGUSR1
GRACE_S = 15
# A stop that follows another one so soon is the same request: `timeout` sends two.
SAME_REQUEST_S = 2


class Stop(SystemExit):
    """A stop signal, which other code than a command's own must not take for an error."""


@dataclass
class _Stops:
    """The state of stop signals: `held` counts the blocks that may not be interrupted."""

    installed: bool = False
    held: int = 0
    pending: int | None = None
    raised_at: float = -inf


_stops = _Stops()


@contextmanager
def command() -> Iterator[None]:
    """End a whole command cleanly at a stop signal, with exit code 128 + the signal.

    File names that are not valid text are printed with their bytes as escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with stops_raise():
        try:
            yield
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


def drop_output() -> None:
    """Drop the remaining output, which Python would fail to write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def stops_raise() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP unwind the stack, so that everything is cleaned up.

    SIGINT raises KeyboardInterrupt, the others Stop. An ignored signal, as under
    `nohup`, stays ignored. Does nothing inside another such block, or outside the main thread.
    """
    if _stops.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    current = {s: signal.getsignal(s) for s in STOPS}
    old = {s: handler for s, handler in current.items() if handler is not signal.SIG_IGN}
    _stops.installed = True
    for s in old:
        signal.signal(s, _stop)
    try:
        yield
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)
        _stops.installed, _stops.pending, _stops.raised_at = False, None, -inf


def _stop(signum: int, frame: object) -> None:
    if _stops.held:
        _stops.pending = signum
        return
    now = time.monotonic()
    if now - _stops.raised_at > SAME_REQUEST_S:
        _stops.raised_at = now
        raise KeyboardInterrupt if signum == signal.SIGINT else Stop(128 + signum)


@contextmanager
def held() -> Iterator[None]:
    """Delay stop signals until the end of the block, so that the block completes."""
    _stops.held += 1
    try:
        yield
    finally:
        _stops.held -= 1
        if not _stops.held and _stops.pending is not None:
            signum, _stops.pending = _stops.pending, None
            _stop(signum, None)


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `parent`, else the system's; the end of the block removes it."""
    folder: Path | None = None
    with stops_raise():
        try:
            with held():
                folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            yield folder
        finally:
            if folder is not None:
                with held():
                    shutil.rmtree(folder)


def spawn(command: Sequence[str | Path], **options: Any) -> subprocess.Popen:
    """Start a process in a session of its own; the tests fork theirs (tests/forking.py)."""
    return subprocess.Popen(command, start_new_session=True, **options)


@contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a process in a session of its own; the end of the block ends all that it started.

    `options` are those of subprocess.Popen.
    """
    process: subprocess.Popen | None = None
    with stops_raise():
        try:
            with held():
                process = spawn(command, **options)
            yield process
        finally:
            if process is not None and process.poll() is None:
                with held():
                    end(process)


def run(
    command: Sequence[str | Path],
    *,
    input: bytes | None = None,
    limit_s: float | None = None,
    env: Mapping[str, str] = os.environ,
    **options: Any,
) -> subprocess.CompletedProcess:
    """Run a command to its end and return its exit code and output, as subprocess.run does.

    What it leaves in the temporary folder is removed. `options` are those of subprocess.Popen.

    Raises:
        OSError: there is no such program.
        subprocess.TimeoutExpired: it ran longer than `limit_s` seconds; it was ended.
    """
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        temporary_folder("mqo-command-") as scratch,
        started(command, env={**env, "TMPDIR": str(scratch)}, **pipes, **options) as process,
    ):
        out, errors = process.communicate(input, timeout=limit_s)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


class Leaving:
    """The handler of SAVE for a training process; `was_asked` tells whether SAVE came."""

    def __init__(self) -> None:
        self.was_asked = False

    def watch(self, process: subprocess.Popen, *, is_worker: bool) -> None:
        """Pass SAVE on to `process`, or to its workers if it is torchrun.

        They get SIGTERM; upstream then finishes the step, saves and exits. torchrun gets nothing,
        because it would kill them after half a minute.
        """

        import psutil  # not at the top: see `_below`

        def ask(signum: int, frame: object) -> None:
            self.was_asked = True
            with suppress(psutil.NoSuchProcess):
                program = psutil.Process(process.pid)
                for worker in [program] if is_worker else program.children():
                    worker.terminate()

        signal.signal(SAVE, ask)


@contextmanager
def leaves_on_signal() -> Iterator[Leaving]:
    """Yield the handler of SAVE while a training process starts and runs.

    Processes started inside ignore SAVE, because some batch systems send it to every process.
    """
    old = signal.signal(SAVE, signal.SIG_IGN)
    try:
        yield Leaving()
    finally:
        signal.signal(SAVE, old)


def end(process: subprocess.Popen, grace: float = GRACE_S) -> None:
    """End the process, its group, and descendants that left the group.

    SIGTERM comes first, and SIGKILL `grace` seconds later. torchrun gives each worker a session of
    its own, which signals to the group do not reach. With a `grace` of 0 only SIGKILL is sent,
    because a training may save between the two signals.
    """
    below = _below(process)
    for s in (signal.SIGTERM, signal.SIGKILL) if grace else (signal.SIGKILL,):
        try:
            os.killpg(process.pid, s)
            # How soon a killed process is gone is up to the system, not to the caller's grace.
            process.wait(timeout=grace if s == signal.SIGTERM else GRACE_S)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    if below:
        from psutil import NoSuchProcess

        for worker in below:
            with suppress(NoSuchProcess):
                worker.kill()


def end_left(variable: str, value: str) -> None:
    """Kill every process of this user whose environment sets `variable` to `value`.

    A process that the kernel killed leaves its children running, in sessions of their own.
    """
    import psutil  # not at the top: see `_below`

    for other in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if other.environ().get(variable) == value:
                other.kill()


def _below(process: subprocess.Popen) -> list[Any]:
    """Return every descendant of the process."""
    try:
        import psutil
    except ImportError:  # quant_type_modifier.py may run with only the standard library
        return []
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
