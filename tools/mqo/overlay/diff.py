"""The changes to upstream as unified diffs, per entry or all together, for `mqo diff`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mqo.overlay.records import Manifest
from mqo.overlay.series import Entry, Series, added_files
from mqo.overlay.tree import Tree
from mqo.overlay.unified import unified

LOCAL = "changed since"
# short: sites in full, the rest as counts; full: everything; stat: only counts
Form = Literal["short", "full", "stat"]


@dataclass(frozen=True)
class FileDiff:
    """A file's part of a diff."""

    path: str
    content: bytes

    @property
    def text(self) -> str:
        """Return the diff as text; bytes that are not UTF-8 are shown as escapes."""
        return self.content.decode("utf-8", errors="backslashreplace")

    @property
    def added(self) -> int:
        """Return the number of lines added."""
        return self._count(b"+")

    @property
    def removed(self) -> int:
        """Return the number of lines removed."""
        return self._count(b"-")

    @property
    def row(self) -> str:
        """Return the line that stands for the diff where only counts are printed."""
        return f"#   {self.path}  +{self.added} -{self.removed}"

    def _count(self, sign: bytes) -> int:
        lines = self.content.split(b"\n")
        body = next((i for i, line in enumerate(lines) if line.startswith(b"@@")), len(lines))
        return sum(line.startswith(sign) for line in lines[body:])


def total(diffs: Sequence[FileDiff]) -> str:
    """Return the numbers of all lines added and removed, as "+3 -2"."""
    return f"+{sum(diff.added for diff in diffs)} -{sum(diff.removed for diff in diffs)}"


@dataclass(frozen=True)
class EntryDiff(FileDiff):
    """One entry's change to one file; `entry` is LOCAL for changes after the series."""

    entry: str


def entry_diffs(tree: Tree, manifest: Manifest, entry: str) -> Iterator[EntryDiff]:
    """Yield what `entry` changed, one diff per file, from the content before to that after."""
    for path in manifest.touched_by(entry):
        file = manifest.files[path]
        before = file.pristine
        for name, after in file.stages:
            if name == entry:
                old = None if before is None else tree.object(before)
                yield EntryDiff(path, unified(path, old, tree.object(after)), entry)
            before = after


def added_diffs(tree: Tree, manifest: Manifest, entry: Entry) -> Iterator[EntryDiff]:
    """Yield the files of an "add" entry as new, for the project's tree, which has them already."""
    if entry.kind == "add":
        for path, content in added_files(entry, tree.root).items():
            if path not in manifest.files and not tree.collides(path):
                yield EntryDiff(path, unified(path, None, content), entry.name)


def local_diffs(tree: Tree, manifest: Manifest | None) -> Iterator[EntryDiff]:
    """Yield the tree's changes beyond the series: quant types set in the source, and hand edits."""
    paths = set(tree.edited_files())
    for path, file in manifest.files.items() if manifest else ():
        if tree.state_of(path, file) == "patched":
            paths.add(path)
    for path in sorted(paths):
        if content := local_diff(tree, path, manifest):
            yield EntryDiff(path, content.encode("utf-8", "surrogateescape"), LOCAL)


def local_diff(tree: Tree, path: str, manifest: Manifest | None = None) -> str:
    """Return the diff of a file from what mqo, or else upstream, wrote; '' without one."""
    manifest = manifest or tree.manifest()
    if manifest and path in manifest.files:
        expected: bytes | None = tree.object(manifest.files[path].final)
    else:
        expected = tree.pristine(path) if path in tree.upstream().files else None
    diff = unified(path, expected, tree.read(path))
    return diff.decode("utf-8", errors="backslashreplace")


def tree_diff(tree: Tree, root: Tree) -> str:
    """Return the diff from upstream to `root`, which is the tree or a snapshot of it.

    Added files appear as new files.
    """
    upstream = tree.upstream().files
    diffs = []
    for path in sorted(path for path in upstream if path.endswith(".py")):
        diffs.append(unified(path, tree.pristine(path), root.read(path)))
    for path in sorted(p.relative_to(root.root).as_posix() for p in root.root.rglob("*.py")):
        if path not in upstream:
            diffs.append(unified(path, None, root.read(path)))
    return b"".join(diffs).decode("utf-8", errors="backslashreplace")


# -- `mqo diff` ------------------------------------------------------------------------------------


def changes(tree: Tree, series: Series, names: Sequence[str]) -> list[EntryDiff]:
    """Return what the named entries changed; without names, all changes, even later ones."""
    series.check_names(names)
    tree.upstream()
    manifest = tree.patched() if names else tree.manifest()
    diffs: list[EntryDiff] = []
    for entry in manifest.entries if manifest else ():
        if manifest and (not names or entry.name in names):
            diffs += entry_diffs(tree, manifest, entry.name)
            if entry.name in series.names:
                diffs += added_diffs(tree, manifest, series[entry.name])
    return diffs if names else diffs + list(local_diffs(tree, manifest))


def diff_lines(series: Series, diffs: Sequence[EntryDiff], form: Form) -> Iterator[str]:
    """Yield the lines to print, by kind of entry: site, add, codemod, then other changes."""
    if not diffs:
        yield "# nothing differs"
    kinds = {entry.name: entry.kind for entry in series.entries}
    names = dict.fromkeys(change.entry for change in diffs)
    order = ["site", "add", "codemod", None]
    for name in sorted(names, key=lambda name: order.index(kinds.get(name))):
        yield from textwrap.wrap(
            _title(series, name), 80, subsequent_indent="#   ", break_on_hyphens=False
        )
        shown = name == LOCAL or form == "full" or (form == "short" and kinds.get(name) == "site")
        for change in (change for change in diffs if change.entry == name):
            if shown and form != "stat":
                yield change.text.rstrip("\n")
            else:
                yield change.row
        yield "#"
    if diffs and form == "stat":
        files = len({change.path for change in diffs})
        yield f"# total: {files} files, {total(diffs)}"


def _title(series: Series, name: str) -> str:
    if name == LOCAL:
        return "# changed since the series was applied (quant types, hand edits)"
    if name not in series.names:
        return f"# {name}: an entry that the series no longer holds"
    return f"# {name} ({series[name].kind}): {series[name].reason}"
