"""What state a tree is in: read-only, fast, without LibCST."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mqo.overlay import literals
from mqo.overlay.apply import applied_entries
from mqo.overlay.literals import TypeLiteral
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree

EntryState = Literal["applied", "not applied", "outdated", "incomplete"]


@dataclass(frozen=True)
class EntryStatus:
    """One entry of the series on this tree."""

    name: str
    kind: str
    state: EntryState
    files: int
    reason: str


@dataclass(frozen=True)
class Status:
    """A tree's version, its entries, files changed by hand, and the quant types in its source."""

    version: str
    origin: str
    entries: tuple[EntryStatus, ...]
    edited: tuple[str, ...]
    types: tuple[tuple[str, TypeLiteral], ...]

    @property
    def clean(self) -> bool:
        """Every entry applied as it stands now, and nothing changed by hand."""
        return not self.edited and all(entry.state == "applied" for entry in self.entries)


def status(tree: Tree, series: Series) -> Status:
    """Read the tree's records and hash its files."""
    upstream, manifest = tree.upstream(), tree.manifest()
    rows = []
    for entry, record in zip(series.entries, applied_entries(series), strict=True):
        state: EntryState = "not applied"
        touched: list[str] = []
        if manifest:
            touched = manifest.touched_by(entry.name)
            complete = all(tree.state_of(p, manifest.files[p]) != "pristine" for p in touched)
            if record in manifest.entries:
                state = "applied" if complete else "incomplete"
            elif record.name in {e.name for e in manifest.entries}:
                state = "outdated"
        files = len(entry.files) if entry.kind == "add" else len(touched)
        rows.append(EntryStatus(entry.name, entry.kind, state, files, entry.reason))
    types = []
    for path in manifest.touched_by("quant_sites") if manifest else []:
        types += [(path, literal) for literal in literals.read(tree.read(path) or b"")]
    return Status(
        upstream.version, upstream.origin, tuple(rows), tuple(tree.edited_files()), tuple(types)
    )
