"""Make a run's own copy of the tree, with the run's quant types written into the sites.

The files of a copy that is kept are never hard links, because an editor that saves in place would
write through them. They are read-only, so that the source a run keeps is the source it ran.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mqo.errors import OverlayError, check_name
from mqo.overlay import literals, runtime
from mqo.overlay.goal import types_in
from mqo.overlay.plan import plan
from mqo.overlay.records import Manifest
from mqo.overlay.series import Series, added_files
from mqo.overlay.transaction import building
from mqo.overlay.tree import Tree, sha256
from mqo.project import Project

IGNORED = shutil.ignore_patterns(".git", ".mqo", "__pycache__", "UPSTREAM.toml")
READ_ONLY = ~0o222
CODE = (".py", ".toml")


@dataclass(frozen=True)
class Snapshot:
    """The copy, the types in its source, and the types in the shared tree."""

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
    is_temporary: bool = False,
) -> Snapshot:
    """Copy the patched tree to `target`, which must not exist, and set its literals to `types`.

    Sites that `types` does not name get 'none'; `types` may also name sites as 'none' that the tree
    lacks. With `types` None the tree's literals stay as they are. `without` names entries to leave
    out of `series`, which must then be given; entries that require one of them are left out, too.
    A temporary copy has hard links where the file system allows them.
    """
    if target.resolve().is_relative_to(tree.root.resolve()):
        raise OverlayError(f"{target} is in the tree itself", expected="a folder outside of it")
    tree.patched()  # before the lock, which would make a folder even without a tree
    copy = _link if is_temporary else _copy
    with tree.reading("snapshot"):
        files, written, shared = edits(tree, types=types, without=without, series=series)
        with building(tree.root, target, command="snapshot") as folder:
            shutil.copytree(
                tree.root, folder, ignore=_left_out, dirs_exist_ok=True, copy_function=copy
            )
            for path, content in files.items():
                _write(folder / path, content)
            lend_helper(Project.here().tree, folder)
    return Snapshot(Tree(target), written, shared)


def edits(
    tree: Tree,
    *,
    types: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
    series: Series | None = None,
) -> tuple[dict[str, bytes | None], dict[str, str], dict[str, str]]:
    """Return what a snapshot with these arguments changes; the caller holds the tree's lock.

    Returns:
        The files that differ from the tree, None if removed; the types of the copy, and the tree's.
    """
    manifest = tree.patched()
    _refuse_unfinished(tree, manifest)
    shared = types_in(tree, manifest)
    named = {site: kind for site, kind in (types or {}).items() if kind != literals.NONE}
    for site in named:
        check_name("GEMM site", site, shared)
    files: dict[str, bytes | None] = {}
    if without:
        files |= _undone(tree, manifest, series.without(*without) if series else Series(()))
    files |= _runtime(tree, manifest)
    wanted = shared if types is None else {s: types.get(s, literals.NONE) for s in shared}
    written: dict[str, str] = {}
    for path in [] if "quant_sites" in without else manifest.touched_by("quant_sites"):
        content = files[path] if path in files else tree.read(path)
        files[path] = content = literals.write(content or b"", wanted)
        written |= {literal.site: literal.value for literal in literals.read(content)}
    _check_written(tree, named, written)
    return files, written, shared


def digests(root: Path, files: Mapping[str, bytes | None]) -> dict[str, str]:
    """Return {path: SHA-256} of the Python and TOML files of a folder's copy with these edits."""
    sums: dict[str, str] = {}
    for folder, folders, names in os.walk(root, followlinks=True):
        left_out = _left_out(folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in left_out]
        for name in names:
            path = os.path.relpath(f"{folder}/{name}", root)
            if name.endswith(CODE) and name not in left_out and path not in files:
                sums[path] = sha256(Path(folder, name).read_bytes())
    code = {path: text for path, text in files.items() if path.endswith(CODE) and text is not None}
    return sums | {path: sha256(text) for path, text in code.items()}


def lend_helper(lender: Path, source: Path) -> None:
    """Copy the compiled dataset helper of a tree into another with the same C++ source.

    Without it, upstream compiles it in each run, with the first python3 and pybind11 on the path.
    """
    mine, theirs = (root / "megatron/core/datasets" for root in (lender, source))
    name = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    code = [path / "helpers.cpp" for path in (mine, theirs)]
    if not (mine / name).is_file() or (theirs / name).exists() or not code[1].is_file():
        return
    if code[0].read_bytes() == code[1].read_bytes():
        shutil.copy2(mine / name, theirs / name)


def _runtime(tree: Tree, manifest: Manifest) -> dict[str, bytes]:
    """Return the runtime of the running mqo, for a copy of the project tree, which lacks it."""
    if runtime.ENTRY not in manifest.names or (tree.root / runtime.FOLDER).exists():
        return {}
    return added_files(Series.of_project(Project.here())[runtime.ENTRY], tree.root)


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return what no copy needs, and dangling links, which some checkouts hold."""
    return IGNORED(folder, names) | {name for name in names if not Path(folder, name).exists()}


def _check_written(tree: Tree, types: Mapping[str, str], written: Mapping[str, str]) -> None:
    """Refuse a type that the copy's source does not have."""
    for site, quant_type in types.items():
        if written.get(site, literals.NONE) != quant_type:
            raise OverlayError(
                f"A copy of {tree.root} has {site} = {written.get(site, 'nothing')}",
                expected=f"{quant_type}, as requested",
                help="Include the patch quant_sites, which a quant type needs",
            )


def _undone(tree: Tree, manifest: Manifest, rest: Series) -> dict[str, bytes | None]:
    """Compute the files that the left-out entries changed, from the rest of the series."""
    gone = set(manifest.names) - set(rest.names)
    touched = {path for name in gone for path in manifest.touched_by(name)}
    if not touched:
        names = ", ".join(sorted(gone)) or "the patch"
        raise OverlayError(
            f"Leaving out {names} has no effect, because it changed no file of {tree.root}",
            expected="a patch that changed files; `mqo status` lists them",
        )
    upstream = tree.upstream().files
    files = plan(rest, manifest.version, upstream, tree.pristine, only=touched)
    contents: dict[str, bytes | None] = dict.fromkeys(touched)
    contents |= {path: tree.pristine(path) for path in touched if path in upstream}
    return contents | {path: files[path].content for path in touched & files.keys()}


def _refuse_unfinished(tree: Tree, manifest: Manifest) -> None:
    for path, file in sorted(manifest.files.items()):
        if tree.state_of(path, file) == "pristine":
            raise OverlayError(
                f"{path} holds upstream's bytes: something undid its patches",
                expected="a tree with every recorded patch in place",
                help="Run `mqo apply`, which puts them back",
            )
    for path in manifest.touched_by("quant_sites"):
        literals.read(tree.read(path) or b"")  # a run needs known types


def _copy(source: str, target: str) -> None:
    """Copy content and permission bits, without write permission."""
    shutil.copyfile(source, target)
    Path(target).chmod(Path(source).stat().st_mode & READ_ONLY)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or another user's file
        shutil.copyfile(source, target)


def _write(path: Path, content: bytes | None) -> None:
    """Replace the content of a file of the copy, and leave it read-only; remove it for None."""
    mode = path.stat().st_mode if path.exists() else 0o644
    path.unlink(missing_ok=True)
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode & READ_ONLY)
