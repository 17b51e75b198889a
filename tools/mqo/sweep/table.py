"""Show a sweep: a live table on a terminal or plain lines elsewhere, and a final summary."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mqo.display import EVERY_S, duration
from mqo.launch.progress import Progress
from mqo.sweep.state import Entry

COLUMNS = ("run", "state", "step", "loss", "tok/s", "ETA")
_STYLES = {"done": "green", "failed": "red", "running": "cyan", "queued": "dim"}
# The other lines of a live table: the title, the header, and the line of the cursor.
_OTHER_LINES = 4


class Lines:
    """The view for logs: one line per event, and the progress of running jobs at intervals."""

    def __init__(self, console: Console) -> None:
        self.console, self.said = console, time.monotonic()

    def say(self, text: str) -> None:
        """Print the text."""
        _print(self.console, text)

    def show(self, entries: Sequence[Entry], running: dict[str, Progress]) -> None:
        """Print the progress of running jobs, at intervals."""
        if time.monotonic() - self.said < EVERY_S:
            return
        self.said = time.monotonic()
        for name, progress in running.items():
            _print(self.console, f"running  {name}")
            _print(self.console, progress.line())
        _print(self.console, counts(entries))


class LiveTable:
    """The view for a terminal: failed jobs, running jobs, and as many others as fit."""

    def __init__(self, live: Live, labels: Mapping[str, str]) -> None:
        self.live, self.labels = live, labels

    def say(self, text: str) -> None:
        """Print failures and an early end above the table, which shows everything else."""
        if text.startswith(("failed", "ended")):
            _print(self.live.console, text)

    def show(self, entries: Sequence[Entry], running: dict[str, Progress]) -> None:
        """Redraw the table."""
        room = max(1, self.live.console.height - _OTHER_LINES)
        order = ("failed", "running", "queued", "done")
        chosen = sorted(entries, key=lambda entry: order.index(entry.state))[:room]
        rows = [
            (self.labels.get(entry.name, entry.name), *_row(entry, running.get(entry.name)))
            for entry in chosen
        ]
        self.live.update(table(counts(entries), COLUMNS, rows), refresh=True)


View = Lines | LiveTable


@contextmanager
def shown(console: Console, labels: Mapping[str, str]) -> Iterator[View]:
    """Yield the view for the console; `labels` are the names of the runs in its table."""
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveTable(live, labels)


def summary(entries: Sequence[Entry], labels: Mapping[str, str]) -> Table:
    """Return a table of how each run ended, with losses in nats per token."""
    columns = ("run", "state", "steps", "loss", "valid", "time")
    return table("", columns, [(labels[entry.name], *_ended(entry)) for entry in entries])


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for 80 columns, with names aligned left and numbers aligned right."""
    result = Table(title=title or None, title_justify="left", box=None, padding=(0, 1, 0, 0))
    result.add_column(columns[0], overflow="fold")
    result.add_column(columns[1], no_wrap=True)
    for name in columns[2:]:
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(*row, style=_STYLES[row[1]])
    return result


def counts(entries: Sequence[Entry]) -> str:
    """Return '3 of 60 done, 2 running, 1 failed'."""
    number = {state: sum(entry.state == state for entry in entries) for state in _STYLES}
    rest = [f"{number[s]} {s}" for s in ("running", "failed") if number[s]]
    return ", ".join([f"{number['done']} of {len(entries)} done", *rest])


def _row(entry: Entry, progress: Progress | None) -> tuple[str, ...]:
    if progress is None:
        return (*_ended(entry)[:3], "", "")
    speed, left = progress.tokens_per_s, progress.seconds_left
    return (
        entry.state,
        f"{progress.step}/{progress.steps}",
        _loss(progress.loss),
        "" if speed is None else f"{speed:,.0f}" if speed < 1e4 else f"{speed / 1e3:,.0f}k",
        "" if left is None else duration(left),
    )


def _ended(entry: Entry) -> tuple[str, ...]:
    steps = "" if entry.iterations is None else str(entry.iterations)
    time = "" if entry.seconds is None else duration(entry.seconds)
    losses = _loss(entry.train_loss), _loss(entry.valid_loss)
    return entry.state, steps, *losses, time


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
