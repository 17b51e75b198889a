"""A run's own copy of the tree, with the run's quant types written into the sites.

A copy, never a hard link: an editor that saves in place would write through one. Read-only, so that
the source a run keeps is the source it ran.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mqo.errors import OverlayError
from mqo.overlay import literals
from mqo.overlay.apply import pristine_reader, types_in, with_types
from mqo.overlay.plan import plan
from mqo.overlay.series import Series
from mqo.overlay.tree import Manifest, Tree, write_file

IGNORED = shutil.ignore_patterns(".git", ".mqo", "__pycache__", "UPSTREAM.toml", ".*.mqo-part")


@dataclass(frozen=True)
class Snapshot:
    """The copy, the types in its source, and the types the shared tree had."""

    tree: Tree
    types: Mapping[str, str]
    shared_types: Mapping[str, str]


def snapshot(
    tree: Tree,
    target: Path,
    *,
    types: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
    series: Series | None = None,
) -> Snapshot:
    """Copy the patched tree to `target`, which must not exist, and set its literals to `types`.

    Sites that `types` does not name get 'none'; with `types` None the tree's literals stay as they
    are. `without` names entries to leave out of `series`, which must then be given.
    """
    if target.exists():
        raise OverlayError(f"{target} exists", expected="a folder to be made")
    if target.resolve().is_relative_to(tree.root.resolve()):
        raise OverlayError(f"{target} lies in the tree itself", expected="a folder outside")
    manifest = tree.patched()
    literals.check_sites(types or {}, types_in(tree, manifest))
    rest = series.without(*without) if series else Series(())
    with tree.locked():
        _refuse_unfinished(tree, manifest)
        shared = types_in(tree, manifest)
        shutil.copytree(tree.root, target, ignore=IGNORED)
    copy = Tree(target)
    if without:
        _undo(tree, copy, manifest, rest, without)
    sites = [] if "quant_sites" in without else manifest.touched_by("quant_sites")
    wanted = shared if types is None else {s: types.get(s, literals.NONE) for s in shared}
    for path in sites:
        write_file(target / path, with_types(copy.read(path) or b"", wanted))
    written = {t.site: t.value for p in sites for t in literals.read(copy.read(p) or b"")}
    _check_written(target, types or {}, written)
    _make_read_only(target)
    return Snapshot(copy, written, shared)


def _check_written(target: Path, types: Mapping[str, str], written: Mapping[str, str]) -> None:
    """No type may be asked for that the copy's source does not say."""
    for site, quant_type in types.items():
        if written.get(site, literals.NONE) != quant_type:
            raise OverlayError(
                f"{target} says {site} = {written.get(site, 'nothing')}",
                expected=f"{quant_type}, as asked for",
                help="A snapshot without the patch quant_sites can take no quant type",
            )


def _undo(
    tree: Tree, copy: Tree, manifest: Manifest, rest: Series, without: tuple[str, ...]
) -> None:
    """Compute the files that the entries left out touched again, from the rest of the series."""
    touched = {path for name in without for path in manifest.touched_by(name)}
    read = pristine_reader(tree)
    files = plan(rest, manifest.version, tree.upstream().files, read, only=touched)
    for path in touched:
        content = files[path].content if path in files else read(path)
        write_file(copy.root / path, content)


def _refuse_unfinished(tree: Tree, manifest: Manifest) -> None:
    for path, file in sorted(manifest.files.items()):
        state = tree.state_of(path, file)
        if state in ("pristine", "superseded"):
            raise OverlayError(
                f"{path} is {state}: an application of the patches was cut off",
                expected="a tree with the whole series applied",
                help="Run `mqo apply`, which finishes it",
            )


def _make_read_only(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            path.chmod(path.stat().st_mode & ~0o222)
