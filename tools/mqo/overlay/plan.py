"""Compute in memory what the series makes of every file of a tree, entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from mqo.errors import DriftError, MqoError
from mqo.overlay.codemod import apply_codemod
from mqo.overlay.drift import nearest_names
from mqo.overlay.edits import covers
from mqo.overlay.series import Entry, Series
from mqo.process import Stop

Read = Callable[[str], bytes]


@dataclass(frozen=True)
class FilePlan:
    """A file: its pristine bytes, and the content after each entry, in order.

    `pristine` is None for an added file, which upstream does not have.
    """

    pristine: bytes | None
    stages: tuple[tuple[str, bytes], ...] = ()

    @property
    def content(self) -> bytes:
        """Return the bytes after the last entry that touched the file."""
        return self.stages[-1][1] if self.stages else self.pristine or b""

    def then(self, entry: str, content: bytes) -> FilePlan:
        """Return the plan with one more stage, unless the entry changes nothing."""
        if content == self.content and (self.stages or self.pristine is not None):
            return self  # an empty added file is a change, too
        return replace(self, stages=(*self.stages, (entry, content)))


def plan(
    series: Series,
    version: str,
    paths: Iterable[str],
    read: Read,
    only: Collection[str] | None = None,
) -> dict[str, FilePlan]:
    """Return what the series makes of the files at `paths` (tree-relative) of upstream `version`.

    `read` gives pristine bytes; `only` limits the work to some of the files. Returns only the
    files that change. An entry that this version does not need is skipped. Raises DriftError
    if the series was never tried on this version, or an entry does not match the files.
    """
    if not series.supports(version):
        raise DriftError(
            f"the patch series is for megatron-core {series.supported}, but the tree holds "
            f"{version}",
            expected="a version that the series was verified on",
            help="`mqo vendor` fetches the pinned version, and `mqo verify` shows what another "
            "needs",
        )
    sources = sorted(p for p in paths if p.endswith(".py"))
    files = {path: FilePlan(read(path)) for path in sources if only is None or path in only}
    for entry in series.entries:
        _plan_entry(series, entry, version, files, sources)
    return {path: file for path, file in files.items() if file.stages}


def drift(
    series: Series, version: str, paths: Iterable[str], read: Read
) -> dict[str, int | DriftError]:
    """Return {entry: how many files it changes, or why it does not apply}, whatever the version.

    Unlike `plan`, it skips an entry that does not apply, and continues.
    """
    sources = sorted(p for p in paths if p.endswith(".py"))
    files = {path: FilePlan(read(path)) for path in sources}
    results: dict[str, int | DriftError] = {}
    for entry in series.entries:
        trial = dict(files)
        try:
            _plan_entry(series, entry, version, trial, sources)
        except DriftError as error:
            results[entry.name] = error
        else:
            files = trial
            results[entry.name] = sum(entry.name in dict(f.stages) for f in files.values())
    return results


def _plan_entry(
    series: Series, entry: Entry, version: str, files: dict[str, FilePlan], sources: Collection[str]
) -> None:
    if not entry.applies_to(version):
        return
    try:
        if entry.kind == "site":
            _plan_sites(entry, version, files, sources)
        elif entry.kind == "codemod":
            codemod = entry.load_codemod()
            for path, file in files.items():
                if codemod.concerns(path, file.content):
                    new = apply_codemod(
                        path, file.content, codemod, entry.name, pristine=file.pristine
                    )
                    files[path] = file.then(entry.name, new)
    except DriftError as error:
        known = (
            f"{error.expected}; known good: megatron-core {series.supported or 'of any version'}"
        )
        raise DriftError(error.found, expected=known, help=error.help) from error
    except (MqoError, Stop):
        raise
    except (Exception, SystemExit) as error:  # the patch and its rule are the user's code
        raise entry.failure(f"fails ({type(error).__name__}: {error})") from error


def _plan_sites(
    entry: Entry, version: str, files: dict[str, FilePlan], sources: Collection[str]
) -> None:
    from mqo.overlay.rewrite import rewrite  # LibCST is slow to import, and readers do not plan

    for edits in entry.load_edits():
        # Wheels before 0.17 hold megatron/core only: edits of megatron/training are not needed.
        brought = any(path.startswith(f"{edits.package}/") for path in sources)
        if not brought or not covers(edits.versions, version):
            continue
        if edits.path in sources and edits.path not in files:
            continue  # not among the requested files
        if edits.path not in files:
            near = ", ".join(nearest_names(edits.path, sources, "/"))
            raise DriftError(
                f"megatron-core {version} holds no {edits.path}" + (near and f"; nearest: {near}"),
                expected=f"the file that patch '{entry.name}' edits",
                help="`mqo vendor` fetches the pinned version",
            )
        file = files[edits.path]
        new = rewrite(file.content, edits, version, entry.name, pristine=file.pristine)
        files[edits.path] = file.then(entry.name, new)
