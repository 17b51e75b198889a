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
from mqo.overlay.tree import Manifest, Tree

IGNORED = shutil.ignore_patterns(".mqo", "__pycache__", "UPSTREAM.toml", ".*.mqo-part")


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
    are. `without` names entries of `series` to leave out.
    """
    if target.exists():
        raise OverlayError(f"{target} exists", expected="a folder to be made")
    manifest = tree.patched()
    shared = types_in(tree, manifest)
    with tree.locked():
        shutil.copytree(tree.root, target, ignore=IGNORED)
    copy = Tree(target)
    if without:
        assert series
        _undo(tree, copy, manifest, series, without)
    sites = [] if "quant_sites" in without else manifest.touched_by("quant_sites")
    if types is not None:
        literals.check_sites(types, shared)
        wanted = {site: types.get(site, literals.NONE) for site in shared}
        for path in sites:
            content = copy.read(path) or b""
            (target / path).write_bytes(with_types(content, wanted))
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
    tree: Tree, copy: Tree, manifest: Manifest, series: Series, without: tuple[str, ...]
) -> None:
    """Compute the files that the entries touched again, without them."""
    touched = {path for name in without for path in manifest.touched_by(series[name].name)}
    read = pristine_reader(tree)
    rest = series.without(*without)
    files = plan(rest, manifest.version, tree.upstream().files, read, only=touched)
    for path in touched:
        content = files[path].content if path in files else read(path)
        (copy.root / path).write_bytes(content)


def _make_read_only(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            path.chmod(path.stat().st_mode & ~0o222)
