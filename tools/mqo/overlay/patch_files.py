"""Write the series as patch files for `git apply`, one per entry, in the order of the series."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from mqo.errors import OverlayError
from mqo.overlay.diff import added_diffs, entry_diffs
from mqo.overlay.records import Manifest
from mqo.overlay.series import Entry, Series
from mqo.overlay.transaction import building
from mqo.overlay.tree import Tree


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
            texts[f"{number:04}-{applied.name}.patch"] = _header(entry, manifest) + content
    return texts


def _header(entry: Entry | None, manifest: Manifest) -> bytes:
    lines = ["An entry that the series no longer holds."]
    if entry:
        lines = [f"{entry.name} ({entry.kind})", *textwrap.wrap(entry.reason, 72)]
    lines += [f"For megatron-core {manifest.version}.", "---", ""]
    return "\n".join(lines).encode()
