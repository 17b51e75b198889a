"""Run one command in a forked child with limits of time and memory, and name how it ended."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from mqo import cli, process
from mqo.launch import coverage
from mqo.project import Project

from .. import forking

MOST_SECONDS = 150
MOST_MEMORY = 6 << 30  # bytes of the command and all that it started
MOST_WRITTEN = 1 << 30  # bytes of a file
POLL_S = 0.05
OUTPUTS = ("out.txt", "err.txt")
PROJECT = Project.here()


@dataclass(frozen=True)
class Ending:
    """The exit code of a command (negative for a signal), its output, and the limit that it hit."""

    code: int
    out: str
    err: str
    limit: str | None
    seconds: float

    def name(self) -> str:
        """Return used, refused, or the kind of failure."""
        if self.limit:
            return self.limit
        if "File too large" in self.out + self.err or "disk is full" in self.err:
            return "disk"
        if "Traceback (most recent" in self.out + self.err:
            return "traceback"
        if self.code not in (0, 1, 2):
            return "crash"
        if self.code and ": " not in self.err:
            return "no sentence"
        return "refused" if self.code else "used"


def run(words: list[str], folder: Path) -> Ending:
    """Run a command in `folder`: `mqo ...`, or a Python program with its path."""
    server = forking.server()  # before the fork, for all commands
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
    for name in OUTPUTS:
        (folder / name).write_text("")
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(words, folder)
    limit, status = None, None
    while status is None:
        time.sleep(POLL_S)
        pid, ended = os.waitpid(child, os.WNOHANG)
        if pid:
            status = ended
        elif time.monotonic() - begun > MOST_SECONDS:
            limit = "hang"
        elif _memory(child) > MOST_MEMORY:
            limit = "memory"
        if limit:
            _kill(child)
            _, status = os.waitpid(child, 0)
    _kill(None)
    texts = [(folder / name).read_text(errors="replace") for name in OUTPUTS]
    code = os.waitstatus_to_exitcode(status)
    return Ending(code, *texts, limit, time.monotonic() - begun)


def _become(words: list[str], folder: Path) -> None:
    """Be a process that runs a command, and end."""
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
        os.chdir(folder)
        for stream, name in enumerate(OUTPUTS, 1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # pytest has streams of its own.
        sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
        os.environ |= {"MLFLOW_TRACKING_URI": f"file:{folder}/mlruns", "HF_HUB_OFFLINE": "1"}
        process.spawn = forking.popen
        coverage.record = lambda *words: None  # a process per training that reads no file
        project = replace(PROJECT, chosen_runs=folder / "runs")
        chosen = lambda cls, runs=None: replace(project, chosen_runs=runs or project.chosen_runs)  # noqa: E731
        Project.here = classmethod(chosen)
        code = _exit_code(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(words: list[str]) -> int:
    sys.argv = list(words)
    try:
        if words[0] == "mqo":
            with process.command():
                cli.main()
        elif "examples" in words[0]:
            return forking.popen([sys.executable, *words]).wait()
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    return 0


def _started(child: int | None) -> Iterator[psutil.Process]:
    """Yield the child, and what it and the server of forked programs have started."""
    with suppress(psutil.Error):
        yield from psutil.Process(forking.server().process.pid).children(recursive=True)
    if child:
        with suppress(psutil.Error):
            one = psutil.Process(child)
            yield from (*one.children(recursive=True), one)


def _memory(child: int) -> int:
    total = 0
    for one in _started(child):
        with suppress(psutil.Error):
            found = one.memory_info()
            total += found.rss - found.shared
    return total


def _kill(child: int | None) -> None:
    for one in _started(child):
        with suppress(psutil.Error):
            one.send_signal(signal.SIGKILL)
