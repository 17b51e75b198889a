"""`mqo restore`: restore upstream's files in the tree."""

from __future__ import annotations

from typing import Annotated

import typer

from mqo.commands.options import (
    EntriesArgument,
    ForceOption,
    JsonOption,
    TreeOption,
    patch_series,
    settled,
)
from mqo.terminal import emit


def restore(
    names: EntriesArgument = None,
    force: ForceOption = False,
    with_dependents: Annotated[
        bool, typer.Option("--with-dependents", help="Also undo patches that require a named one.")
    ] = False,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Restore upstream's files, or undo only the named entries."""
    from mqo.overlay import apply as overlay

    outcome = overlay.restore(
        settled(tree), patch_series(), names or (), force=force, with_dependents=with_dependents
    )
    match outcome:
        case overlay.Restored(changed, entries, remaining, kept):
            lines = [f"restored {', '.join(entries)}: {changed} files written"]
            lines += [f"still applied: {', '.join(remaining)}"] if remaining else []
            lines += [f"kept a copy of a hand edit: {path}" for path in kept]
        case overlay.AlreadyPristine():
            which = "none of these patches" if names else "no patch"
            lines = [f"nothing to do: {which} is applied"]
    lines += [f"left as it is, changed by hand: {path}" for path in outcome.left]
    emit("restore", outcome, "\n".join(lines), as_json)
