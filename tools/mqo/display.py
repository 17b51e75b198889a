"""Show progress: a live line in a terminal, or one line per minute in a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

Say = Callable[[str], None]
EVERY_S = 60
REDRAWN_S = 0.2
RECENT_S = 60
WIDTH = 80


class Display:
    """Print permanent lines, with progress between them. Calling it prints a line.

    `say` gets the lines if `console` is not a terminal. `now` is a clock in seconds.
    """

    def __init__(
        self,
        say: Say = lambda line: None,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        alive = console is not None and console.is_terminal and not console.is_dumb_terminal
        self._say, self._console, self._now = say, console if alive else None, now
        self._live: Live | None = None
        self._shown, self._last = now(), ""

    @classmethod
    def on(cls, stream: TextIO) -> Display:
        """Return a display on stdout or stderr, with the live line where that is a terminal."""

        def say(line: str) -> None:
            print(line, file=stream, flush=True)

        if not stream.isatty():
            return cls(say)
        from rich.console import Console

        return cls(say, Console(file=stream))

    @classmethod
    def around(cls, say: Say) -> Display:
        """Return `say` if it is a display; otherwise a display that gives it a line per minute."""
        return say if isinstance(say, Display) else cls(say)

    def __call__(self, line: str) -> None:
        """Print a permanent line."""
        if self._live:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._last = line
            self._say(line)

    def show(self, line: str) -> None:
        """Show progress: immediately in a terminal, otherwise after a minute if it changed."""
        since = self._now() - self._shown
        if self._live is None:
            if since >= EVERY_S and line != self._last:
                self._shown = self._now()
                self(line)
        elif since >= REDRAWN_S:
            from rich.text import Text

            self._shown = self._now()
            room = min(WIDTH, self._live.console.width) - 1
            text = Text(line[:room], no_wrap=True, overflow="crop")
            self._live.update(text, refresh=True)

    @contextmanager
    def live(self) -> Iterator[Display]:
        """Show the live line until the end of the block."""
        self._shown = self._now()
        if self._console is None or self._live:
            yield self
            return
        from rich.live import Live

        self._shown = -inf
        # No thread redraws it, because a thread would interfere with forks.
        live = Live("", console=self._console, auto_refresh=False, transient=True)
        live.start()
        self._live = live
        try:
            yield self
        finally:
            self._live = None
            with suppress(OSError):  # the terminal may be gone, which may be why the work ends
                live.stop()


class Rate:
    """The speed of a count over the last minute."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, count: float) -> None:
        """Record the current count, if it has changed."""
        if self._seen and count == self._seen[-1][1]:
            return
        now = self._now()
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RECENT_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float | None:
        """Return the growth per second; None before the second count."""
        if not self._seen:
            return None
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    def seconds_left(self, total: float) -> float | None:
        """Return the time until the count is `total`, at this speed; None if unknown."""
        return (total - self._seen[-1][1]) / self.per_s if self.per_s else None


class Count:
    """Show `head`, a count, its speed, and the time left."""

    def __init__(
        self, display: Display, head: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._display, self._head, self._rate = display, head, Rate(now)

    def show(self, advance: tuple[str, int, int]) -> None:
        """Show (unit, done, total); may be called often."""
        unit, done, total = advance
        self._rate.add(done)
        counts = f"{done:,}/{total:,} {unit}"
        speed, left = self._rate.per_s, self._rate.seconds_left(total)
        self._display.show(facts(self._head, counts, per_s=speed, left=left, unit=unit))


def duration(seconds: float) -> str:
    """Return '9:07', '2:05:00' or '3d 04h'."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def facts(
    *parts: str, per_s: float | None = None, left: float | None = None, unit: str = "tokens"
) -> str:
    """Join the known facts: the parts, how many `unit` per second, and the time left in seconds."""
    speed = "" if per_s is None else f"{per_s:,.0f} {unit}/s"
    rest = "" if left is None else f"{duration(left)} left"
    return "  ".join(filter(None, (*parts, speed, rest)))


def stderr() -> Display:
    """Return the display of commands whose stdout is their result."""
    return Display.on(sys.stderr)
