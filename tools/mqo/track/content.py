"""Collect the data of a run folder for trackers: parameters, metrics, files and packed source."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mqo.errors import RunError
from mqo.runs import SWEEP, RunFolder, Value, flat
from mqo.track.tracker import MetricRow, Status
from mqo.untrusted import Limit, check_file, reading

SOURCE = "source.tar.gz"


def parameters(run: RunFolder) -> dict[str, Value]:
    """Return the run's configuration by path."""
    return dict(flat(run.read_config()))


def group_of(run: RunFolder) -> str | None:
    """Return the name of the sweep that the run belongs to."""
    above = run.root.parent
    return above.name if (above / SWEEP).is_file() else None


def values(rows: Iterable[Mapping[str, Any]]) -> Iterator[MetricRow]:
    """Yield the rows that are numbers; histograms are left out."""
    for row in rows:
        if "value" in row:
            yield MetricRow(row["iteration"], row["name"], row["value"])


def status_of(run: RunFolder) -> Status:
    """Return how the run ended; a run without a result failed or was killed."""
    return "finished" if run.result.is_file() else "failed"


def inputs(run: RunFolder, scratch: Path) -> list[Path]:
    """Return the files from before the training, with the source as an archive in `scratch`."""
    files = (run.quant_config, run.overlay_diff, run.environment, run.command)
    paths = [*files, run.coverage, run.coverage_table]
    if run.source.is_dir():
        paths.append(pack(run.source, scratch / SOURCE))
    return [file for file in paths if file.parent == scratch or _may_be_sent(run, file)]


def results(run: RunFolder) -> list[Path]:
    """Return the files that the training wrote, without the log, which may contain anything."""
    files = (run.result, run.failure, run.quant_stats, run.implementation, run.device)
    return [file for file in files if _may_be_sent(run, file)]


def _may_be_sent(run: RunFolder, file: Path) -> bool:
    """Return whether a file of a run exists.

    Raises:
        RunError: it is too large, not a regular file, or a link that leads out of the run's folder.
    """
    if not os.path.lexists(file):
        return False
    with reading(RunError):
        check_file(file, Limit.RECORD, within=run.root)
    return True


def pack(folder: Path, archive: Path) -> Path:
    """Pack a folder without bytecode; the same content gives the same bytes.

    Raises:
        RunError: a file is too large for a source file.
    """
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                if not path.is_symlink():  # a link is packed as a link
                    with reading(RunError):
                        check_file(path, Limit.RECORD)
                name = Path(folder.name, path.relative_to(folder)).as_posix()
                tar.add(path, name, recursive=False, filter=_without_owner)
    return archive


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry
