"""Send a run folder to a tracker, at once or while the run trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from mqo.errors import FULL, MqoError, RunError, TrackerError, check_name, one_line
from mqo.extras import require
from mqo.process import temporary_folder
from mqo.runs import MetricsTail, RunFolder, is_run
from mqo.track import content, sent
from mqo.track.mlflow import Mlflow
from mqo.track.tracker import Sent, Tracker
from mqo.track.wandb import Wandb

TRACKERS: dict[str, Callable[[], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}
AT_ONCE = 1000  # rows to send before trackers.json is written

# Draws pictures of a run into a folder, and returns them.
Draw = Callable[[RunFolder, Path], list[Path]]


def check(name: str) -> None:
    """Refuse an unknown tracker, or one whose package is missing."""
    check_name("tracker", name, TRACKERS)
    require(name)


def find(places: Iterable[Path]) -> list[RunFolder]:
    """Return the runs at `places`: each is a run, or a folder of runs, which are sorted by name.

    RunError if a folder has no runs.
    """
    runs = []
    for root in map(Path.resolve, places):
        below = [root] if is_run(root) else sorted(filter(is_run, root.glob("*")))
        if not below:
            raise RunError(f"{root} holds no run", expected="folders with a cell.json")
        runs += below
    return [RunFolder(path) for path in runs]


def track(run: RunFolder, name: str, draw: Draw, rest: Callable[[], bool] | None = None) -> str:
    """Send a run, or the part that the tracker lacks; return its address as text.

    For a run that is training, `rest` waits a while and returns whether it still trains.

    Raises:
        TrackerError: the tracker failed, or another process is sending the run.
    """
    with sent.held(run):
        before = sent.read(run).get(name)
        if rest is None and before and before == _whole(run, before):
            return f"nothing was sent: run {before.id} is complete"
        with _failures(run, name):
            session = Session(run, name, before)
            while rest is not None and rest():
                session.update()
            return session.end(draw)


def _whole(run: RunFolder, before: Sent) -> Sent:
    """Return what a tracker has when it has all of the run."""
    rows = sum(1 for _ in content.values(MetricsTail(run.metrics).rows()))
    return Sent(before.id, rows, content.status_of(run))


@contextmanager
def _failures(run: RunFolder, name: str) -> Iterator[None]:
    """Raise any error of a tracker as TrackerError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MqoError) or getattr(error, "errno", None) in FULL:
            raise
        raise TrackerError(f"{name} failed: {one_line(error)}", help=remedy(run, name)) from error


def remedy(run: RunFolder, name: str) -> str:
    """Return the help for a failed tracker."""
    return f"`mqo track '{run.root}' --tracker {name}` sends the rest"


class Session:
    """A run that is being sent to a tracker."""

    def __init__(self, run: RunFolder, name: str, before: Sent | None) -> None:
        self.folder, self.name = run, name
        self.tracker = TRACKERS[name]()
        run.read_config()  # if it is damaged, the tracker gets no run
        if before is None:
            before = Sent(self.tracker.create(run))
            sent.write(run, name, before)
        self.sent = self.tracker.open(run, before)
        sent.write(run, name, self.sent)
        with temporary_folder("mqo-track-") as scratch:
            self.tracker.attach("inputs", content.inputs(run, scratch))
        self._rows = MetricsTail(run.metrics)
        self._known = self.sent.rows

    def update(self) -> None:
        """Send new rows."""
        rows = content.values(self._rows.rows())
        while part := list(islice(rows, AT_ONCE)):
            new = part[self._known :]
            self._known -= len(part) - len(new)
            if new:
                self.tracker.log(new)
                self.sent = replace(self.sent, rows=self.sent.rows + len(new))
                sent.write(self.folder, self.name, self.sent)

    def end(self, draw: Draw) -> str:
        """Send the rest (rows, results, pictures); return the run's address as text."""
        self.update()
        if files := content.results(self.folder):
            self.tracker.attach("results", files)
        with temporary_folder("mqo-track-") as scratch:
            for file in draw(self.folder, scratch):
                self.tracker.picture(file.stem, file)
            status = content.status_of(self.folder)
            where = self.tracker.end(status)
        sent.write(self.folder, self.name, replace(self.sent, status=status))
        return where
