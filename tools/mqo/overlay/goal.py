"""Compute what a tree should hold with exactly these entries applied; write nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mqo.overlay import literals
from mqo.overlay.plan import FilePlan, plan
from mqo.overlay.records import AppliedEntry, Manifest, PatchedFile
from mqo.overlay.series import Entry, Series
from mqo.overlay.transaction import Change, mode_of
from mqo.overlay.tree import Tree, sha256


@dataclass(frozen=True)
class Goal:
    """The changes to make, the manifest to record, and the contents it refers to.

    `not_placed` are files that are not added, because upstream has files of the same name.
    """

    changes: tuple[Change, ...]
    manifest: Manifest | None
    objects: tuple[bytes, ...]
    not_placed: tuple[str, ...] = ()


def goal(tree: Tree, series: Series) -> Goal:
    """Compute the tree with the entries of `series` applied, and no others.

    Quant types in the tree are kept. Raises DriftError if an entry does not fit this upstream.
    """
    upstream, old = tree.upstream(), tree.manifest()
    files = plan(series, upstream.version, upstream.files, tree.pristine) if series.entries else {}
    placed, not_placed = _placed(tree, series, upstream.version)
    files |= placed
    types = types_in(tree, old) if old else {}
    wanted: dict[str, bytes | None] = {
        path: literals.write(file.content, types) for path, file in files.items()
    }
    for path in old.files if old else ():
        if path in upstream.files:
            wanted.setdefault(path, tree.pristine(path))
        elif not tree.collides(path):  # else it was an added file, and has been committed since
            wanted.setdefault(path, None)
    known = {path: file.mode for path, file in old.files.items()} if old else {}  # before patches
    modes = {p: known[p] if p in known else mode_of(tree.root / p) for p in wanted}
    rows = {
        path: PatchedFile(
            None if file.pristine is None else sha256(file.pristine),
            tuple((entry, sha256(content)) for entry, content in file.stages),
            modes[path],
        )
        for path, file in files.items()
    }
    manifest = Manifest(upstream.version, applied_entries(series, tree), rows)
    objects = [file.pristine for file in files.values() if file.pristine is not None]
    objects += [content for file in files.values() for _, content in file.stages]
    return Goal(
        changes=tuple(
            Change(path, content, modes[path])
            for path, content in sorted(wanted.items())
            if tree.read(path) != content
        ),
        manifest=manifest if series.entries else None,
        objects=tuple(objects),
        not_placed=not_placed,
    )


def applied_entries(series: Series, tree: Tree) -> tuple[AppliedEntry, ...]:
    """Return the series as a manifest of this tree records it."""
    upstream = tree.upstream().digest
    digests = ((e, f"{upstream} {_digest(series, e, tree)}") for e in series.entries)
    return tuple(AppliedEntry(e.name, e.kind, sha256(d.encode())) for e, d in digests)


def is_current(tree: Tree, manifest: Manifest | None, series: Series) -> bool:
    """Return whether the tree has all of these entries applied in their current form."""
    if manifest is None:
        return not series.entries
    same = manifest.entries == applied_entries(series, tree)
    return same and all(tree.state_of(p, f) == "patched" for p, f in manifest.files.items())


def types_in(tree: Tree, manifest: Manifest) -> dict[str, str]:
    """Return {site: type}, read from the literals in the tree."""
    types: dict[str, str] = {}
    for path in manifest.touched_by("quant_sites"):
        types |= {t.site: t.value for t in literals.read_if_any(tree.read(path) or b"")}
    return types


def _placed(
    tree: Tree, series: Series, version: str
) -> tuple[dict[str, FilePlan], tuple[str, ...]]:
    """Return the added files that this tree lacks, and those that collide with upstream's."""
    files: dict[str, FilePlan] = {}
    colliding: list[str] = []
    for entry in (e for e in series.entries if e.kind == "add" and e.applies_to(version)):
        for path, content in series.placed_files(entry, tree.root).items():
            if tree.collides(path):
                colliding.append(path)
            else:
                files[path] = FilePlan(None).then(entry.name, content)
    return files, tuple(colliding)


def _digest(series: Series, entry: Entry, tree: Tree) -> str:
    """Return the SHA-256 of an entry's definition, to compare with that of a patched tree."""
    if entry.kind != "add":
        return sha256(entry.source.read_bytes())
    digest = hashlib.sha256()
    for path, content in series.placed_files(entry, tree.root).items():
        digest.update(f"{path} {sha256(content)}\n".encode())
    return digest.hexdigest()
