"""Explain why a training failed, from failure.txt and the log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from mqo.runs import RunFolder
from mqo.untrusted import Limit, UntrustedFileError, read_text

# Errors of a process that lost another one. The cause is elsewhere.
_FOLLOWS = re.compile(
    r"\bby peer\b|broken pipe|gloo/transport|DistNetworkError|communicator was aborted"
    r"|remote process exited|collective operation timeout|socket timeout",
    re.IGNORECASE,
)
# A process in torchrun's summary that a signal ended.
_ENDED = re.compile(
    r"^ *host *: (?P<host>\S+)\s*\n"
    r" *rank *: (?P<rank>\d+) .*\n"
    r" *exitcode *: -\d+ +\(pid: (?P<pid>\d+)\).*\n"
    r"(?: *error_file *: .*\n)?"
    r" *traceback *: Signal (?P<number>\d+) ",
    re.MULTILINE,
)
_NAMED = (
    r"[\w.]*GuardError\b",  # before its other lines, which begin with "mqo: "
    r"mqo: .*\. Expected: ",  # other lines of mqo are notes
    r"\S+\.py: error: ",
    r"(?!torch\.distributed\.elastic)[\w.]*(Error|Exception)\b",
)


@dataclass(frozen=True)
class Ended:
    """A process that a signal ended: its rank, process id, host, and the signal's number."""

    rank: int
    pid: int
    host: str
    number: int

    @property
    def follows(self) -> bool:
        """Return whether another process may have caused its end or abort."""
        return self.number in (signal.SIGTERM, signal.SIGABRT)

    def text(self) -> str:
        """Return a clause: which process, and which signal."""
        try:
            name = signal.Signals(self.number).name
        except ValueError:
            name = f"signal {self.number}"
        text = f"rank {self.rank} (process {self.pid} on {self.host}) was ended by {name}"
        if self.number == signal.SIGKILL:
            text += "; the kernel's out-of-memory killer is the usual cause"
        return text


def reason(folder: RunFolder, alone: Ended | None = None) -> str:
    """Return why a run failed, in one line: the first known cause.

    `alone` is the only process of a run, if a signal ended it: torchrun does not report that.

    Causes are, in this order, the program's failure.txt, the signal that ended a process, and the
    last error in the log. Errors that only report the loss of another process come last.
    """
    text = _read(folder.failure).strip()
    if text and not _FOLLOWS.search(text):
        return text
    log = _read(folder.log)
    signaled = [alone] if alone else ended_by_signal(log)
    ended = sorted(signaled, key=lambda process: process.follows)
    if ended and not ended[0].follows:
        return ended[0].text()
    lines = log.splitlines()
    if cause := _last_error([line for line in lines if not _FOLLOWS.search(line)]):
        return cause
    if ended:
        return ended[0].text()
    if lost := text or _last_error(lines):
        return f"{lost} (another process may have failed first: see the log of each node)"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def ended_by_signal(log: str) -> list[Ended]:
    """Return the processes that torchrun's summary says a signal ended, the root cause first."""
    return [
        Ended(int(match["rank"]), int(match["pid"]), match["host"], int(match["number"]))
        for match in reversed(list(_ENDED.finditer(log)))
    ]


def _last_error(lines: list[str]) -> str | None:
    for pattern in _NAMED:
        named = [line for line in lines if re.match(rf"(\[rank\d+\]: )?{pattern}", line)]
        if named:
            return named[-1].strip()
    return None


def _read(path: Path) -> str:
    try:
        return read_text(path, Limit.TEXT, errors="replace")
    except UntrustedFileError:
        return ""
