"""`mqo apply`: apply the patch series to the tree."""

from __future__ import annotations

from mqo.commands.options import (
    EntriesArgument,
    ForceOption,
    JsonOption,
    TreeOption,
    patch_series,
    settled,
)
from mqo.terminal import emit


def apply(
    names: EntriesArgument = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Apply the patch series, or the named entries with what they require."""
    from mqo.overlay import apply as overlay
    from mqo.overlay.quant_types.by_hand import files_by_hand

    root = settled(tree)
    outcome = overlay.apply(root, patch_series(), names or (), force=force)
    match outcome:
        case overlay.Applied(changed, entries, not_placed, kept):
            lines = [f"applied {', '.join(entries)}: {changed} files written"]
            lines += [f"not added, because upstream has this file: {path}" for path in not_placed]
            lines += [f"kept a copy of a hand edit: {path}" for path in kept]
            lines += [
                f"warning: {path} still has quantization made by hand; after `mqo restore`, "
                "`mqo adopt` replaces it"
                for path in files_by_hand(root)
            ]
        case overlay.AlreadyApplied(files):
            lines = [f"nothing to do: already applied ({files} files)"]
    emit("apply", outcome, "\n".join(lines), as_json)
