"""Follow a run while it trains, in a separate process, so that the training does not wait."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mqo.display import Say
from mqo.process import GRACE_S, started
from mqo.runs import RunFolder
from mqo.terminal import last_error
from mqo.track.session import remedy
from mqo.untrusted import Limit, read_text

END_S = 60  # time to send the rest when a training has ended

News = Callable[[], list[str]]


@contextmanager
def following(run: RunFolder, name: str | None, report: Say) -> Iterator[News]:
    """Let a tracker follow the run until the end of the block; do nothing if `name` is None.

    The tracker's process notices by its closed stdin that this one has ended or was killed, and
    reads in the run folder how the run ended. The yielded function returns a warning, once, if the
    tracker's process has failed.
    """
    if name is None:
        yield list
        return
    command = [sys.executable, "-m", "mqo", "track", str(run.root), "--tracker", name, "--live"]
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        run.tracker_log.open("wb") as log,
        started(command, stdout=log, **streams) as process,
    ):
        follower = Follower(run, name, process)
        limit_s = GRACE_S
        try:
            yield follower.news
            limit_s = END_S
        finally:
            if process.poll() is None:
                report(f"tracker  : sending the rest to {name}, for at most {limit_s} s")
            for line in follower.end(limit_s):
                report(line)


class Follower:
    """The process that follows a run."""

    def __init__(self, run: RunFolder, name: str, process: subprocess.Popen) -> None:
        self.run, self.name, self.process = run, name, process
        self.warned = False

    def news(self) -> list[str]:
        """Return a warning if the process has failed since the last call."""
        if self.warned or self.process.poll() in (None, 0):
            return []
        own = last_error(self._output())
        return self._warning(own or f"{self.name} ended with code {self.process.returncode}")

    def end(self, limit_s: float) -> list[str]:
        """Let the process send the rest, for at most `limit_s` seconds; return the outcome."""
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return [] if self.warned else self._warning(f"{self.name} took over {limit_s} s")
        if self.process.returncode:
            return self.news()
        return [f"tracker  : {self.name}: {self._output().splitlines()[-1]}"]

    def _warning(self, text: str) -> list[str]:
        self.warned = True
        help = remedy(self.run, self.name)
        return [f"warning  : {text}" if help in text else f"warning  : {text}. {help}."]

    def _output(self) -> str:
        return read_text(self.run.tracker_log, Limit.TEXT, errors="replace")
