"""Try the patch series on a release: vendor, apply, compile, train one step, restore, compare.

Everything happens in a temporary tree. The checks of the source are in `source`, the forward
and backward pass is in `forward`, the table in `table`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mqo.display import Display, Say
from mqo.errors import DriftError, MqoError
from mqo.overlay.apply import apply, restore
from mqo.overlay.plan import drift
from mqo.overlay.series import Entry, Series
from mqo.overlay.tree import Tree
from mqo.overlay.vendor import Pin, read_wheel, vendor, wheel_of
from mqo.overlay.verify.forward import PROGRAM, Forward, Outcome, try_forward
from mqo.overlay.verify.source import compile_faults, restore_faults
from mqo.process import temporary_folder
from mqo.untrusted import Limit, read_bytes

EntryOutcome = Literal["applied", "not needed", "drifted", "not tried"]


@dataclass(frozen=True)
class EntryResult:
    """The result of one entry; `files` counts the files it changed, `why` reports a drift."""

    name: str
    outcome: EntryOutcome
    files: int = 0
    why: str = ""


@dataclass(frozen=True)
class Verified:
    """The series on one release: its entries, the forward check, and all faults.

    `lacks` is the missing package that prevented the forward check. The pinned release (`pinned`)
    must run; for another it suffices that everything compiles. `error` tells why nothing could be
    tried: its wheel could not be fetched or is not trusted.
    """

    version: str
    entries: tuple[EntryResult, ...]
    forward: Outcome = "not tried"
    lacks: str = ""
    faults: tuple[str, ...] = ()
    pinned: bool = False
    error: str = ""

    @property
    def green(self) -> bool:
        """Return whether the series may claim to support this release."""
        sound = all(entry.outcome in ("applied", "not needed") for entry in self.entries)
        fit = ("run",) if self.pinned else ("run", "compiled only")
        return sound and self.forward in fit and not self.faults and not self.error

    def as_table(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {**asdict(self), "green": self.green}


def verify(
    version: str,
    pin: Pin,
    series: Series,
    cache: Path,
    *,
    report: Say = print,
    position: str = "",
) -> Verified:
    """Try `series` on release `version`, with the files and the program of its own tree.

    `position` (" (2 of 5)") is for the progress that `report` gets. Faults of the
    release or the series are in the result, never raised.
    """
    report(f"verifying {version}{position}")
    try:
        wheel = wheel_of(pin, version, cache, report)
        members = read_wheel(read_bytes(wheel, Limit.TEXT), pin.packages, wheel.name)
        result = _verify(wheel, members, version, pin, series, cache, report)
    except MqoError as error:
        untried = tuple(EntryResult(entry.name, "not tried") for entry in series.entries)
        return Verified(version, untried, error=str(error))
    return replace(result, pinned=version == pin.version)


def verify_tree(
    tree: Tree, pin: Pin, series: Series, cache: Path, *, report: Say = print
) -> Verified:
    """Verify upstream's files of a tree: those of HEAD in a git work tree.

    The tree itself is only read. Raises OverlayError if it does not hold Megatron.
    """
    upstream = tree.upstream()
    report(f"verifying {upstream.version}, from {upstream.origin}")
    members = {path: tree.pristine(path) for path in upstream.files}
    with temporary_folder("mqo-verify-") as folder:
        for path, content in members.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return _verify(folder, members, upstream.version, pin, series, cache, report)


def _verify(
    source: Path,
    members: Mapping[str, bytes],
    version: str,
    pin: Pin,
    series: Series,
    cache: Path,
    report: Say,
) -> Verified:
    """Try the series on what `source`, a wheel or a folder, holds below the pinned packages."""
    assert series.ours is not None
    with temporary_folder("mqo-verify-") as folder:
        tree = Tree(folder / "tree")
        (tree.root / PROGRAM).parent.mkdir(parents=True)
        shutil.copyfile(series.ours / PROGRAM, tree.root / PROGRAM)
        vendor(tree, pin, cache, source=source, report=report)
        result = _try(tree, series, version, folder, Display.around(report))
        left = restore_faults(tree, pin.packages, members)
    return replace(result, faults=(*result.faults, *left))


def _try(tree: Tree, series: Series, version: str, folder: Path, display: Display) -> Verified:
    """Check the patched tree, then restore it; snapshots go to `folder`."""
    faults = _claim_faults(tree, series, version)
    # This command determines the range, so the range must not stop it.
    anywhere = replace(series, supported="")
    display.show(f"  {version}: applying the patches")
    try:
        apply(tree, anywhere)
    except DriftError:
        return Verified(version, _drifted(tree, series), faults=tuple(faults))
    touched = tree.patched().touched_by
    entries = tuple(_entry_result(entry, len(touched(entry.name))) for entry in series.entries)
    display.show(f"  {version}: compiling")
    broken = compile_faults(tree)
    display.show(f"  {version}: forward and backward passes")
    forward = Forward("not tried") if broken else try_forward(tree, anywhere, folder)
    faults += [*broken, *forward.faults]
    display.show(f"  {version}: restoring")
    try:
        restore(tree, anywhere)
    except MqoError as error:
        faults.append(f"restore refused: {error}")
    return Verified(version, entries, forward.outcome, forward.lacks, tuple(faults))


def _claim_faults(tree: Tree, series: Series, version: str) -> list[str]:
    faults = []
    stated = tree.upstream().version
    if stated != version:
        faults.append(f"the wheel of {version} says that it is {stated}")
    if not series.supports(version):
        faults.append(
            f"{version} is outside `supported` in series.toml ({series.supported}): "
            "if nothing else is wrong, widen it"
        )
    return faults


def _drifted(tree: Tree, series: Series) -> tuple[EntryResult, ...]:
    """Try every entry by itself, since `apply` stops at the first that fails."""
    upstream = tree.upstream()
    results = drift(series, upstream.version, upstream.files, tree.pristine)
    for entry in (e for e in series.entries if e.kind == "add" and e.applies_to(upstream.version)):
        results[entry.name] = len(series.placed_files(entry, tree.root))
    return tuple(_entry_result(e, results[e.name]) for e in series.entries)


def _entry_result(entry: Entry, result: int | DriftError) -> EntryResult:
    if isinstance(result, DriftError):
        return EntryResult(entry.name, "drifted", why=str(result))
    return EntryResult(entry.name, "applied" if result else "not needed", result)
