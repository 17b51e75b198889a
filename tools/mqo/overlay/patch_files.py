"""Write the series as patch files for `git am` and `git apply`, one per entry, in their order."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mqo.errors import OverlayError
from mqo.overlay.diff import added_diffs, entry_diffs
from mqo.overlay.records import Manifest
from mqo.overlay.series import Entry, Series
from mqo.overlay.transaction import building
from mqo.overlay.tree import Tree

# The first line of a patch in a mail, as `git format-patch` writes it, with no commit.
_FIRST = f"From {'0' * 40} Mon Sep 17 00:00:00 2001"
_ENDS = re.compile("---|diff -|Index: |From ")  # what ends a message, or begins another


def export(
    tree: Tree, series: Series, names: Sequence[str], target: Path, *, repository: Path
) -> tuple[Path, ...]:
    """Write NNNN-NAME.patch of each applied entry (of those in `names`, if any) to a new folder.

    Applied to upstream's files in this order, they give the patched tree with every quant type at
    'none'. The same tree gives the same bytes. OverlayError inside `repository` (this project's
    checkout), because the hunks hold upstream's text, and if `target` exists.
    """
    if target.resolve().is_relative_to(repository.resolve()):
        raise OverlayError(
            f"{target} is in {repository}, this project's repository",
            expected="a folder outside, because the hunks hold upstream's text",
        )
    series.check_names(names)
    tree.patched()  # before the lock, which would make a folder even without a tree
    with tree.reading("diff --export"):
        manifest = tree.patched()
        texts = _texts(tree, manifest, series, names)
        with building(tree.root, target, command="diff --export") as folder:
            for name, content in texts.items():
                (folder / name).write_bytes(content)
    return tuple(target / name for name in texts)


def _texts(
    tree: Tree, manifest: Manifest, series: Series, names: Sequence[str]
) -> dict[str, bytes]:
    texts = {}
    for number, applied in enumerate(manifest.entries, start=1):
        if names and applied.name not in names:
            continue
        diffs = list(entry_diffs(tree, manifest, applied.name))
        entry = series[applied.name] if applied.name in series.names else None
        if entry:
            diffs += added_diffs(tree, manifest, entry)
        if diffs:
            content = b"".join(diff.content for diff in diffs)
            texts[f"{number:04}-{applied.name}.patch"] = (
                _header(applied.name, entry, manifest) + content
            )
    return texts


def _header(name: str, entry: Entry | None, manifest: Manifest) -> bytes:
    """Return the header of a mail, as `git am` reads it: the entry is the subject."""
    subject = f"{name} ({entry.kind})" if entry else name
    reason = entry.reason if entry else "An entry that the series no longer holds."
    # A space, because these lines would end the message.
    body = [f" {line}" if _ENDS.match(line) else line for line in textwrap.wrap(reason, 71)]
    lines = [_FIRST, "From: mqo <mqo@localhost>", f"Subject: [PATCH] {subject}", "", *body]
    lines += ["", f"For megatron-core {manifest.version}.", "---", ""]
    return "\n".join(lines).encode()
