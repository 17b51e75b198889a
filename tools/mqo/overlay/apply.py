"""Apply and restore: move a tree to another set of applied entries, all files or none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mqo.errors import EditedError, OverlayError, check_name
from mqo.overlay import records, transaction
from mqo.overlay.diff import local_diff
from mqo.overlay.goal import Goal, goal, is_current
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree


@dataclass(frozen=True)
class Applied:
    """These entries are applied now; `changed` files were written.

    `not_placed` are files that were not added, because upstream has files of the same name; `kept`
    are copies of overwritten hand edits, in the tree's .mqo.
    """

    changed: int
    entries: tuple[str, ...]
    not_placed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class AlreadyApplied:
    """Nothing to do: the entries are applied, in `files` files."""

    files: int


@dataclass(frozen=True)
class Restored:
    """The restored `entries`, and the `remaining` ones, which are still applied.

    Files that only `entries` had changed are upstream's again. `kept` are copies of overwritten
    hand edits. `left` are files that the user changed and the overlay did not; they stay.
    """

    changed: int
    entries: tuple[str, ...]
    remaining: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class AlreadyPristine:
    """Nothing to do; `left` as in Restored."""

    left: tuple[str, ...] = ()


def apply(
    tree: Tree, series: Series, names: Sequence[str] = (), *, force: bool = False
) -> Applied | AlreadyApplied:
    """Apply the named entries and what they require; by default all entries.

    Entries that are already applied stay.

    Raises DriftError if an entry does not fit, and EditedError for a file changed by hand that
    would be overwritten, unless `force` is given, which keeps a copy.
    """
    tree.upstream()  # raises without a tree, before the lock makes a folder
    requested = series.with_required(names or series.names)
    with tree.reading("apply"):
        manifest = tree.manifest()
        wanted = series.only({*requested, *(manifest.names if names and manifest else ())})
        if is_current(tree, manifest, wanted):
            assert manifest is not None, "the series has no entries"
            return AlreadyApplied(len(manifest.files))
        target = goal(tree, wanted)
        kept = _move(tree, target, "apply", force=force)
        return Applied(len(target.changes), wanted.names, target.not_placed, kept)


def restore(
    tree: Tree,
    series: Series,
    names: Sequence[str] = (),
    *,
    force: bool = False,
    with_dependents: bool = False,
) -> Restored | AlreadyPristine:
    """Undo the named entries, by default all: upstream's bytes come back, hash-checked.

    `with_dependents` also undoes the applied entries that require one of them.

    Raises:
        OverlayError: without `with_dependents`, if there are such entries.
        EditedError: as in `apply`.
    """
    tree.upstream()
    with tree.locked("restore"):
        manifest = tree.manifest()
        applied = manifest.names if manifest else ()
        gone = names_to_restore(series, applied, names, with_dependents)
        if manifest is None or not gone:
            return AlreadyPristine(tuple(tree.edited_files()))
        rest = series.only(set(applied) - gone)
        target = goal(tree, rest)
        # Before anything is written, because a file that cannot be read raises here.
        edited = () if rest.entries else tree.edited_files()
        kept = _move(tree, target, "restore", force=force)
        written = {change.path for change in target.changes}
        left = tuple(path for path in edited if path not in written)
        undone = tuple(name for name in applied if name in gone)
        return Restored(len(target.changes), undone, rest.names, kept, left)


def names_to_restore(
    series: Series, applied: Collection[str], names: Sequence[str], with_dependents: bool
) -> set[str]:
    """Return the applied entries to undo, by default all; OverlayError as in `restore`."""
    known = {*series.names, *applied}
    for name in names:
        check_name("patch", name, known)
    gone = set(names or applied) & set(applied)
    independent = series.without(*gone.intersection(series.names)).names
    dependents = [n for n in series.names if n in applied and n not in gone.union(independent)]
    if dependents and not with_dependents:
        verb = "require" if dependents[1:] else "requires"
        raise OverlayError(
            f"{', '.join(dependents)} {verb} {', '.join(sorted(gone))}, and would stay applied",
            expected="no applied patch that requires a restored one",
            help=f"Restore all: `mqo restore {' '.join(names)} --with-dependents`",
        )
    return gone.union(dependents)


def _move(tree: Tree, target: Goal, command: str, *, force: bool) -> tuple[str, ...]:
    """Make the changes, unless they would overwrite a hand edit; return the copies kept."""
    edited = _edits(tree, target)
    if edited and not force:
        raise _edited_error(tree, edited, "--force overwrites the files")
    manifest, copies = target.manifest, tree.copies_of(edited)
    used = set(tree.upstream().files.values()) if tree.is_vendored else set()
    if manifest:
        used |= manifest.objects | {row.original for row in tree.modified().values()}
    written: dict[str, bytes | None] = {
        **copies,
        **tree.new_objects(target.objects),
        **tree.unused_objects(used),
        records.MANIFEST: records.as_json(manifest) if manifest else None,
    }
    if manifest is None:
        written[records.LITERALS] = None  # every literal is upstream's again
    transaction.commit(tree.root, target.changes, written, command=command)
    return tuple(f"{transaction.STORE}/{copy}" for copy in copies)


def _edits(tree: Tree, target: Goal) -> list[str]:
    """Return the files to be written whose content is neither upstream's nor mqo's."""
    old = tree.manifest()
    upstream = tree.upstream().files
    patched = old.files if old else {}
    edited = []
    for change in target.changes:
        content = tree.read(change.path)
        if change.path in patched:
            if tree.state_of(change.path, patched[change.path]) not in ("edited", "missing"):
                continue
        elif content is None and change.path not in upstream:
            continue  # an added file goes there
        if change.path not in upstream or content != tree.pristine(change.path):
            edited.append(change.path)
    return edited


def _edited_error(tree: Tree, edited: Sequence[str], remedy: str) -> EditedError:
    more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
    files = f"{', '.join(edited[:3])}{more} in {tree.root}"
    detail = "".join(local_diff(tree, path) for path in edited)
    aside = f"{remedy} and keeps copies in .mqo/kept"
    if tree.is_checkout and tree.manifest() is None and tree.upstream().files.keys() >= {*edited}:
        return EditedError(
            f"Files that patches change were changed since HEAD: {files}",
            expected="files as in HEAD where patches change them",
            help=f"Commit the change, shown below, or stash it with git; or {aside}",
            detail=detail,
        )
    return EditedError(
        f"Files were changed by hand since mqo wrote them: {files}",
        expected="upstream's bytes or the patched ones",
        help=f"Undo the change, shown below; or {aside}",
        detail=detail,
    )


def refuse_edits(tree: Tree) -> None:
    """Raise EditedError if any file was changed by hand, even if no entry touches it."""
    if edited := tree.edited_files():
        raise _edited_error(tree, edited, "`mqo vendor --force` starts again")
