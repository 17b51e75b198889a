"""`mqo diff` as text: sites in full, added files and sweeps summed up, hand edits last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from mqo.overlay.diff import LOCAL, FileDiff, added_diffs, entry_diffs, local_diffs
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree

# short: sites in full, the rest as counts; full: everything; stat: counts alone
Form = Literal["short", "full", "stat"]


def changes(tree: Tree, series: Series, names: Sequence[str]) -> list[FileDiff]:
    """What the named entries changed; without names, what all did and what came after."""
    for name in names:
        series[name]
    tree.upstream()
    manifest = tree.patched() if names else tree.manifest()
    found: list[FileDiff] = []
    for entry in manifest.entries if manifest else ():
        if manifest and (not names or entry.name in names):
            found += entry_diffs(tree, manifest, entry.name)
            if entry.name in series.names:
                found += added_diffs(tree, manifest, series[entry.name])
    return found if names else found + list(local_diffs(tree, manifest))


def lines(series: Series, found: Sequence[FileDiff], form: Form) -> Iterator[str]:
    """The lines to print, by kind of entry: site, add, sweep, and what is no entry's."""
    if not found:
        yield "# nothing differs"
    kinds = {entry.name: entry.kind for entry in series.entries}
    names = dict.fromkeys(change.entry for change in found)
    order = ["site", "add", "sweep", None]
    for name in sorted(names, key=lambda name: order.index(kinds.get(name))):
        yield _title(series, name)
        shown = name == LOCAL or form == "full" or (form == "short" and kinds.get(name) == "site")
        for change in (change for change in found if change.entry == name):
            if shown and form != "stat":
                yield change.text.rstrip("\n")
            else:
                yield f"#   {change.path}  +{change.added} -{change.removed}"
        yield "#"


def _title(series: Series, name: str) -> str:
    if name == LOCAL:
        return "# changed since the series was applied (quant types, hand edits)"
    if name not in series.names:
        return f"# {name}: an entry that the series holds no more"
    return f"# {name} ({series[name].kind}): {series[name].reason}"
