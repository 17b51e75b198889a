"""`mqo diff` as text: sites in full, added files and sweeps summed up, hand edits last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mqo.overlay.diff import entry_diffs, local_diffs
from mqo.overlay.series import Entry, Series
from mqo.overlay.tree import Manifest, Tree


def lines(tree: Tree, series: Series, names: Sequence[str], *, full: bool) -> Iterator[str]:
    """The lines to print; `names` selects entries, which are then shown in full."""
    chosen = [series[name] for name in names] if names else list(series.entries)
    manifest = tree.manifest() if not names else tree.patched()
    tree.upstream()
    if manifest is None:
        yield "# no patch is applied"
    else:
        for kind in ("site", "add", "sweep"):
            for entry in (e for e in chosen if e.kind == kind):
                yield from _entry_lines(tree, manifest, entry, full=full or bool(names))
    if not names:
        yield from _local_lines(tree, manifest)


def _entry_lines(tree: Tree, manifest: Manifest, entry: Entry, *, full: bool) -> Iterator[str]:
    yield f"# {entry.name} ({entry.kind}): {entry.reason}"
    if entry.kind == "add":
        yield from (f"#   added: {path}" for path in entry.files)
    for change in entry_diffs(tree, manifest, entry.name):
        if entry.kind == "site" or full:
            yield change.text.rstrip("\n")
        else:
            yield f"#   {change.path}  +{change.added} -{change.removed}"
    yield "#"


def _local_lines(tree: Tree, manifest: Manifest | None) -> Iterator[str]:
    for i, change in enumerate(local_diffs(tree, manifest)):
        if i == 0:
            yield "# changed since the series was applied (quant types, hand edits)"
        yield change.text.rstrip("\n")
