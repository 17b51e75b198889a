"""Read and write trackers.json: the part of a run that each tracker has, so none is sent twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from filelock import FileLock, Timeout

from mqo.errors import TrackerError
from mqo.runs import RunFolder, replace_text
from mqo.track.tracker import Sent
from mqo.untrusted import NoFileError, read_json_object


def read(run: RunFolder) -> dict[str, Sent]:
    """Return {tracker: what it has}; TrackerError if the file is damaged."""
    try:
        table = read_json_object(run.trackers)
        return {name: Sent(**row) for name, row in table.items()}
    except NoFileError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise TrackerError(
            f"{run.trackers} cannot be read: {error}",
            expected="a file written by `mqo track`",
            help="Remove it to send the run as a new one",
        ) from error


def write(run: RunFolder, name: str, sent: Sent) -> None:
    """Record what a tracker has; the file is replaced atomically."""
    table = {other: asdict(row) for other, row in (read(run) | {name: sent}).items()}
    replace_text(run.trackers, json.dumps(table, indent=1) + "\n")


@contextmanager
def held(run: RunFolder) -> Iterator[None]:
    """Lock the run for one process; TrackerError for a second one."""
    try:
        lock = FileLock(run.root / ".trackers.lock").acquire(timeout=0)
    except Timeout:
        raise TrackerError(
            f"Another process is sending {run.root}",
            expected="one process at a time; a training with --tracker is one",
            help="Wait for it to end",
        ) from None
    with lock:  # a timeout in the block is another one
        yield
