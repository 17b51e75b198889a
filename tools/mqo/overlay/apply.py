"""Apply and restore: the plan on disk.

The manifest is written before the first file changes and dropped after the last one is pristine
again. So whatever kills the process, the manifest names the content of every file, pristine or
patched, now or by an earlier application: repeating the command finishes it, and `restore` undoes
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mqo.errors import EditedError, OverlayError
from mqo.overlay import literals
from mqo.overlay.plan import FilePlan, plan
from mqo.overlay.series import Series
from mqo.overlay.tree import AppliedEntry, Manifest, PatchedFile, Tree, write_file


@dataclass(frozen=True)
class Applied:
    """The series is in place; `changed` files were written for it."""

    changed: int
    entries: tuple[str, ...]


@dataclass(frozen=True)
class AlreadyApplied:
    """Nothing to do."""

    files: int


@dataclass(frozen=True)
class Restored:
    """Upstream's bytes are back in `changed` files."""

    changed: int


@dataclass(frozen=True)
class AlreadyPristine:
    """Nothing to do."""


def apply(tree: Tree, series: Series) -> Applied | AlreadyApplied:
    """Bring the tree to the state that the series describes; all files or none."""
    tree.upstream()  # before the lock, which would make a folder where there is no tree
    with tree.locked():
        upstream = tree.upstream()
        old = tree.manifest()
        _refuse_edits(tree)
        if old and is_current(tree, old, series):
            return AlreadyApplied(len(old.files))
        files = plan(series, upstream.version, upstream.files, pristine_reader(tree))
        contents = {path: file.content for path, file in files.items()}
        new = _record(tree, series, files)
        if old:
            types = types_in(tree, old)
            contents = {path: with_types(content, types) for path, content in contents.items()}
            stale = set(old.files) - set(files)
            contents |= {path: tree.object(old.files[path].pristine) for path in stale}
            tree.write_manifest(_transition(old, new))
        else:
            tree.write_manifest(new)
        changed = _write_changed(tree, contents)
        if old:
            tree.write_manifest(new)
        return Applied(changed, tuple(entry.name for entry in series.entries))


def restore(tree: Tree) -> Restored | AlreadyPristine:
    """Give back upstream's bytes, hash-checked, and forget the patches."""
    tree.upstream()  # before the lock, which would make a folder where there is no tree
    with tree.locked():
        upstream = tree.upstream()
        manifest = tree.manifest()
        _refuse_edits(tree)
        if manifest is None:
            return AlreadyPristine()
        contents = {path: tree.object(file.pristine) for path, file in manifest.files.items()}
        for path, file in manifest.files.items():
            if upstream.files.get(path) != file.pristine:
                raise OverlayError(
                    f"{path} was pristine when it was patched, and is not what upstream.json names",
                    expected="the same SHA-256",
                    help="Run `mqo vendor --force`, which fetches the tree afresh",
                )
        changed = _write_changed(tree, contents)
        tree.drop_manifest()
        return Restored(changed)


def is_current(tree: Tree, manifest: Manifest, series: Series) -> bool:
    """Whether the tree is patched, completely, with the series as it stands now."""
    same = manifest.entries == applied_entries(series)
    return same and all(tree.state_of(p, f) == "patched" for p, f in manifest.files.items())


def applied_entries(series: Series) -> tuple[AppliedEntry, ...]:
    """The series as a manifest records it."""
    return tuple(AppliedEntry(e.name, e.kind, e.digest) for e in series.entries)


def pristine_reader(tree: Tree) -> Callable[[str], bytes]:
    """A function from a path to upstream's bytes, whether or not the tree is patched."""
    manifest = tree.manifest()
    patched = manifest.files if manifest else {}

    def read(path: str) -> bytes:
        if path in patched:
            return tree.object(patched[path].pristine)
        return (tree.root / path).read_bytes()

    return read


def types_in(tree: Tree, manifest: Manifest) -> dict[str, str]:
    """{site: type} as the tree's literals say now."""
    found: dict[str, str] = {}
    for path in manifest.touched_by("quant_sites"):
        content = tree.read(path)
        found |= {t.site: t.value for t in literals.read(content or b"")}
    return found


def with_types(content: bytes, types: Mapping[str, str]) -> bytes:
    """`content` with its quant type literals set, if it holds any."""
    return literals.write(content, types) if literals.VARIABLE.encode() in content else content


def _refuse_edits(tree: Tree) -> None:
    edited = tree.edited_files()
    if edited:
        more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
        raise EditedError(
            f"{', '.join(edited[:3])}{more} in {tree.root}: changed by hand since mqo wrote it",
            expected="upstream's bytes or the patched ones",
            help="`mqo diff` shows the change; undo it, or `mqo vendor --force` starts afresh",
        )


def _record(tree: Tree, series: Series, files: dict[str, FilePlan]) -> Manifest:
    """Store every content, and describe them."""
    rows = {
        path: PatchedFile(
            tree.keep(file.pristine),
            tuple((entry, tree.keep(content)) for entry, content in file.stages),
        )
        for path, file in files.items()
    }
    return Manifest(tree.upstream().version, applied_entries(series), rows)


def _transition(old: Manifest, new: Manifest) -> Manifest:
    """`new` while its files are being written: each may still hold what `old` names for it."""
    files = {path: PatchedFile(file.pristine, ()) for path, file in old.files.items()}
    files |= new.files
    for path, file in old.files.items():
        files[path] = replace(files[path], earlier=(file.final, *file.earlier))
    return replace(new, files=files)


def _write_changed(tree: Tree, contents: dict[str, bytes]) -> int:
    changed = {p: c for p, c in contents.items() if tree.read(p) != c}
    for path, content in changed.items():
        write_file(tree.root / path, content)
    return len(changed)
