"""The series computed on a whole tree, in memory: what every file would become, entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from mqo.errors import DriftError
from mqo.overlay.edits import FileEdits
from mqo.overlay.series import Entry, Series
from mqo.overlay.sweep import Sweep, sweep_file

Read = Callable[[str], bytes]


@dataclass(frozen=True)
class FilePlan:
    """One file: its pristine bytes and what each entry makes of it, in order."""

    pristine: bytes
    stages: tuple[tuple[str, bytes], ...] = ()

    @property
    def content(self) -> bytes:
        """The bytes after the last entry that touched the file."""
        return self.stages[-1][1] if self.stages else self.pristine

    def then(self, entry: str, content: bytes) -> FilePlan:
        """The plan with one more stage, unless the entry changes nothing."""
        if content == self.content:
            return self
        return replace(self, stages=(*self.stages, (entry, content)))


def plan(
    series: Series,
    version: str,
    paths: Iterable[str],
    read: Read,
    only: Collection[str] | None = None,
) -> dict[str, FilePlan]:
    """What the series makes of the files at `paths` (tree-relative) of upstream `version`.

    `read` gives pristine bytes; `only` limits the work to some of the files. Returns only the
    files that change. Raises DriftError where an
    entry is not meant for this version or does not find its places.
    """
    for entry in series.entries:
        if not entry.holds_in(version):
            raise DriftError(
                f"patch '{entry.name}' is for megatron-core {entry.upstream}, and the tree holds "
                f"{version}",
                expected="a version that every patch of the series knows",
                help="`mqo vendor` fetches the pinned version",
            )
    sources = sorted(p for p in paths if p.endswith(".py"))
    files = {path: FilePlan(read(path)) for path in sources if only is None or path in only}
    for entry in series.entries:
        if entry.kind == "site":
            _plan_sites(entry, version, files, sources)
        elif entry.kind == "sweep":
            _plan_sweep(entry, entry.load_sweep(), files)
    return {path: file for path, file in files.items() if file.stages}


def _plan_sites(
    entry: Entry, version: str, files: dict[str, FilePlan], sources: Collection[str]
) -> None:
    from mqo.overlay.rewrite import rewrite  # LibCST takes long to import, and readers plan nothing

    for edits in entry.load_edits():
        if not edits.holds_in(version) or not _has_package(edits, sources):
            continue
        if edits.path in sources and edits.path not in files:
            continue  # not among the files asked for
        if edits.path not in files:
            raise DriftError(
                f"megatron-core {version} holds no {edits.path}",
                expected=f"the file that patch '{entry.name}' edits",
                help="`mqo vendor` fetches the pinned version",
            )
        file = files[edits.path]
        new = rewrite(file.content, edits, version, entry.name)
        files[edits.path] = file.then(entry.name, new)


def _plan_sweep(entry: Entry, sweep: Sweep, files: dict[str, FilePlan]) -> None:
    for path, file in files.items():
        if sweep.concerns(path, file.content):
            files[path] = file.then(entry.name, sweep_file(path, file.content, sweep, entry.name))


def _has_package(edits: FileEdits, sources: Iterable[str]) -> bool:
    """Wheels before 0.17 hold megatron/core only: edits of megatron/training are not needed."""
    return any(path.startswith(f"{edits.package}/") for path in sources)
