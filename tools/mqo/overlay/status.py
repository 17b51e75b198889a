"""Read the state of a tree, fast and without LibCST."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mqo.overlay import literals
from mqo.overlay.goal import applied_entries
from mqo.overlay.records import AppliedEntry, Manifest
from mqo.overlay.series import Series, added_files
from mqo.overlay.tree import Tree

EntryState = Literal["applied", "not applied", "outdated", "incomplete", "dropped"]


@dataclass(frozen=True)
class EntryStatus:
    """One entry of the series on this tree; "dropped" means that only the tree still has it."""

    name: str
    kind: str
    state: EntryState
    files: int
    reason: str


@dataclass(frozen=True)
class Status:
    """A tree's version, its entries, files changed by hand, and the quant types in its source.

    `unsupported` is the range of releases that the series was verified on if the tree's release is
    outside of it, else "".
    """

    version: str
    origin: str
    unsupported: str
    entries: tuple[EntryStatus, ...]
    edited: tuple[str, ...]
    types: tuple[tuple[str, literals.Literal], ...]

    @property
    def clean(self) -> bool:
        """Return whether all current entries are applied, on a supported release, without edits."""
        sound = not self.edited and not self.unsupported
        return sound and all(entry.state == "applied" for entry in self.entries)


def status(tree: Tree, series: Series) -> Status:
    """Read the tree's records and hash its files."""
    upstream, manifest = tree.upstream(), tree.manifest()
    rows = []
    for entry, record in zip(series.entries, applied_entries(series, tree), strict=True):
        touched = manifest.touched_by(entry.name) if manifest else []
        files = len(touched or added_files(entry, tree.root))
        state = _entry_state(tree, manifest, record, touched) if manifest else "not applied"
        rows.append(EntryStatus(entry.name, entry.kind, state, files, entry.reason))
    known = {entry.name for entry in series.entries}
    types: list[tuple[str, literals.Literal]] = []
    if manifest is not None:
        for old in (entry for entry in manifest.entries if entry.name not in known):
            files = len(manifest.touched_by(old.name))
            rows.append(EntryStatus(old.name, old.kind, "dropped", files, ""))
        for path in manifest.touched_by("quant_sites"):
            content = tree.read(path) or b""
            types += [(path, literal) for literal in literals.read_if_any(content)]
    return Status(
        upstream.version,
        upstream.origin,
        "" if series.supports(upstream.version) else series.supported,
        tuple(rows),
        tuple(tree.edited_files()),
        tuple(types),
    )


def _entry_state(
    tree: Tree, manifest: Manifest, record: AppliedEntry, touched: list[str]
) -> EntryState:
    if record not in manifest.entries:
        known = record.name in {entry.name for entry in manifest.entries}
        return "outdated" if known else "not applied"
    pristine = any(tree.state_of(p, manifest.files[p]) == "pristine" for p in touched)
    return "incomplete" if pristine else "applied"
