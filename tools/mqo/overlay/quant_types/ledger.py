"""Find what a file held before its quant types were first set, even if `mqo` wrote it since."""

from __future__ import annotations

from mqo.errors import EditedError, OverlayError
from mqo.overlay import literals, records
from mqo.overlay.quant_types.sites import scan
from mqo.overlay.records import Modified
from mqo.overlay.tree import Tree, sha256


def row(path: str, original: bytes, written: bytes) -> Modified:
    """Return the record of a file that is about to be written."""
    was, now = values(path, original), values(path, written)
    return Modified(sha256(original), sha256(written), was, now)


def original(tree: Tree, path: str, content: bytes | None, row: Modified | None) -> bytes:
    """Return the bytes before the first modification of a file that holds `content` now.

    Later changes by `mqo apply` and `mqo restore` are not modifications: a restored tree has none,
    and in a tree that was patched again only the literals are modified. Raises EditedError if the
    file was changed by something else.
    """
    if content is None:
        raise _edited(tree, path, "deleted")
    if row is None or sha256(content) == row.original:
        return content
    if sha256(content) == row.written:
        return stored(tree, row.original)
    state = _state(tree, path)
    if state == "pristine":
        return content
    if state == "patched":
        now = values(path, content)
        if all(row.now.get(site, literals.NONE) == value for site, value in now.items()):
            return literals.write(content, {site: row.was.get(site, literals.NONE) for site in now})
        if literals.neutral(content) == content:
            return content
    raise _edited(tree, path, "changed by other means")


def values(path: str, content: bytes) -> dict[str, str]:
    """Return {site: value} of a file's literals; several values joined."""
    sites = scan(path, content).sites
    return {site.name: " ".join(site.values) for site in sites if site.literals}


def _state(tree: Tree, path: str) -> str:
    """Return the state of a file by the records of a tree that `mqo` manages; else ''."""
    manifest = tree.manifest()
    if manifest and path in manifest.files:
        return tree.state_of(path, manifest.files[path])
    vendored = tree.upstream().files if tree.is_vendored else {}
    return "pristine" if sha256(tree.read(path) or b"") == vendored.get(path) else ""


def stored(tree: Tree, sha: str) -> bytes:
    """Return the content with this SHA-256; OverlayError if it is not stored."""
    try:
        return tree.object(sha)
    except OverlayError as error:
        # Its help, to vendor again, is for trees that `mqo` manages.
        raise OverlayError(error.found, expected=error.expected, help=_forget(tree)) from error


def _edited(tree: Tree, path: str, change: str) -> EditedError:
    return EditedError(
        f"{tree.root / path} was {change} since its quant types were set; nothing was changed",
        expected="the bytes written when the types were set",
        help=_forget(tree),
    )


def _forget(tree: Tree) -> str:
    record = tree.store / records.LITERALS
    return (
        "Undo that change; or restore with `--restore --force`, which keeps a copy; or delete "
        f"{record} to take the current files as originals"
    )
