"""What we changed in upstream, as unified diffs: entry by entry, or the whole tree at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from mqo.overlay.apply import pristine_reader
from mqo.overlay.tree import Manifest, Tree

LOCAL = "changed since"


@dataclass(frozen=True)
class FileDiff:
    """One entry's change to one file; `entry` is LOCAL for what came after the series."""

    entry: str
    path: str
    text: str

    @property
    def added(self) -> int:
        """Lines added."""
        return self._count("+")

    @property
    def removed(self) -> int:
        """Lines removed."""
        return self._count("-")

    def _count(self, sign: str) -> int:
        lines = self.text.split("\n")[2:]
        return sum(line.startswith(sign) for line in lines)


def entry_diffs(tree: Tree, manifest: Manifest, entry: str) -> Iterator[FileDiff]:
    """What `entry` changed, file by file: from the content before it to the content after it."""
    for path in manifest.touched_by(entry):
        file = manifest.files[path]
        before = file.pristine
        for name, after in file.stages:
            if name == entry:
                text = unified(path, tree.object(before), tree.object(after))
                yield FileDiff(entry, path, text)
            before = after


def local_diffs(tree: Tree, manifest: Manifest | None) -> Iterator[FileDiff]:
    """What stands in the tree beyond the series: quant types set in the source, and hand edits.

    For an edited file that no entry touches, upstream's bytes are not at hand: the file is named,
    without a diff.
    """
    files = manifest.files if manifest else {}
    for path, file in sorted(files.items()):
        expected, content = tree.object(file.final), tree.read(path) or b""
        if content not in (expected, tree.object(file.pristine)):
            yield FileDiff(LOCAL, path, unified(path, expected, content))
    for path in tree.edited_files():
        if path not in files:
            yield FileDiff(LOCAL, path, f"{path}: changed by hand, and no patch touches it\n")


def tree_diff(tree: Tree, root: Tree) -> str:
    """Everything in which `root` (the tree itself, or a snapshot of it) differs from upstream.

    Files of ours come as new files.
    """
    read, upstream = pristine_reader(tree), tree.upstream().files
    texts = []
    for path in sorted(path for path in upstream if path.endswith(".py")):
        texts.append(unified(path, read(path), root.read(path) or b""))
    for path in sorted(p.relative_to(root.root).as_posix() for p in root.root.rglob("*.py")):
        if path not in upstream:
            texts.append(unified(path, None, root.read(path) or b""))
    return "".join(texts)


def unified(path: str, before: bytes | None, after: bytes) -> str:
    """A unified diff with git's a/ and b/ prefixes; empty when nothing differs.

    `before` None means that the file is new.
    """
    if before == after:
        return ""
    old, new = (_lines(content or b"") for content in (before, after))
    source = "/dev/null" if before is None else f"a/{path}"
    return "".join(difflib.unified_diff(old, new, source, f"b/{path}"))


def _lines(content: bytes) -> list[str]:
    """Lines as diff counts them: `str.splitlines` would end one at a form feed, too."""
    *lines, last = content.decode("utf-8", errors="backslashreplace").split("\n")
    rest = [f"{last}\n\\ No newline at end of file\n"] if last else []
    return [f"{line}\n" for line in lines] + rest
