"""How far an indexing is: documents and tokens, tokens a second, and the time that is left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mqo.display import Display, Rate, Say, duration


class Meter:
    """Shows how much of a corpus was read; `report` gets the lines.

    `interval` is in documents: a line for as many; None is a line a minute, 0 no line.
    """

    def __init__(
        self,
        report: Say,
        interval: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display, self._interval = Display.of(report), interval
        self._bytes, self._tokens = Rate(now), Rate(now)
        self._total = self._next = 0

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._display(line)

    @contextmanager
    def started(self, total: int, tokens: int, done: int) -> Iterator[None]:
        """Measure work that reads `total` bytes; `tokens` and `done` are an earlier run's."""
        self._total, self._next = total, 0
        self._bytes.add(done)
        self._tokens.add(tokens)
        with self._display.live():
            yield

    def show(self, done: int, documents: int, tokens: int) -> None:
        """Show that `done` bytes were read; documents and tokens are of earlier runs, too."""
        self._bytes.add(done)
        self._tokens.add(tokens)
        line = self._line(done, documents, tokens)
        if self._interval is None:
            self._display.show(line)
        elif self._interval and documents >= self._next:
            if self._next:
                self._display(line)
            self._next = documents - documents % self._interval + self._interval

    def _line(self, done: int, documents: int, tokens: int) -> str:
        speed, left = self._tokens.per_s, self._bytes.seconds_left(self._total)
        share = f"{100 * done / max(self._total, 1):.0f} %"
        parts = [share, f"{documents:,} documents", f"{tokens / 1e6:,.1f} M tokens"]
        parts += [] if speed is None else [f"{speed / 1e6:.2f} M/s"]
        parts += [] if left is None else [f"{duration(left)} left"]
        return "  " + "  ".join(parts)
