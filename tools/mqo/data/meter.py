"""How far an indexing is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_REDRAWN = 0.2  # seconds


class Meter:
    """Shows the bytes read of all there are, tokens a second, and the time that is left.

    `report` gets the lines; `interval` is in documents, 0 for no line.
    """

    def __init__(self, report: Callable[[str], None], interval: int = 10_000) -> None:
        self._report, self._interval = report, interval
        self._bar: Progress | None = None
        self._next = self._total = self._begun = self._before = 0
        self._start = self._drawn = 0.0

    def say(self, line: str) -> None:
        """A line of text, above the bar where there is one."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._report(line)

    def start(self, total: int, tokens: int, done: int) -> None:
        """`total` bytes are to be read; `tokens` and `done` (bytes) are an earlier run's."""
        self._total, self._before, self._begun = total, tokens, done
        self._start = self._drawn = time.monotonic()
        if sys.stderr.isatty():
            self._bar = _bar(total)
            self._bar.start()

    def show(self, done: int, documents: int, tokens: int) -> None:
        """`done` bytes were read; documents and tokens of this run and those before."""
        now = time.monotonic()
        speed = (tokens - self._before) / max(now - self._start, 1e-9)
        if self._bar:
            if now - self._drawn >= _REDRAWN:
                self._drawn = now
                task = self._bar.task_ids[0]
                self._bar.update(task, completed=done, speed=f"{speed / 1e6:.2f} M tokens/s")
                self._bar.refresh()
        elif self._interval and documents >= self._next:
            if self._next:
                left = _left(now - self._start, done - self._begun, self._total - done)
                self._report(
                    f"{documents:,} documents, {tokens:,} tokens, {speed / 1e6:.2f} M tokens/s, "
                    f"{left:.0f} s left"
                )
            self._next = documents - documents % self._interval + self._interval

    def stop(self) -> None:
        """Takes the bar away."""
        if self._bar:
            self._bar.stop()
            self._bar = None


def _left(seconds: float, done: int, left: int) -> float:
    return seconds * left / max(done, 1)


def _bar(total: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[speed]}"))
    # Redrawn by `show`: a thread of its own would be in the way of the workers' forks.
    made = Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
    )
    made.add_task("", total=total, speed="")
    return made
